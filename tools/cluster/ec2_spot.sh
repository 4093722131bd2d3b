#!/bin/bash
# Requests EC2 spot machines that train, stop when AWS takes them back, and go on when it gives them
# back. The arguments are those of `segtrain train`:
#
#   export IMAGE=ami-... TYPE=g6.xlarge PROFILE=segtrain
#   WORK=s3://bucket/folder ec2_spot.sh mine.yaml
#   WORK=fs-0123.efs.eu-central-1.amazonaws.com:/ COUNT=4 ec2_spot.sh mine.yaml --nnodes 2:4
#
# IMAGE: Ubuntu with Python 3.11 or newer, the aws command and, for a GPU, its driver, such as the
#   Deep Learning Base AMI. PROFILE: an instance profile that may read and write WORK, and
#   ec2:DescribeInstances and ec2:CancelSpotInstanceRequests.
# WORK: a folder with segtrain's wheel, the data and the config, whose paths are relative to it. From
#   S3, one machine copies it to its disk, and copies runs/ back at each stop. Several machines need
#   a folder that they share, as an NFS export (EFS).
# DISK: GB of the machine's disk (100). SUBNET, GROUP: where the machines reach each other; their
#   security group lets them connect on all ports among themselves.
set -euo pipefail

here=$(dirname "$0")
count=${COUNT:-1}
: "${IMAGE:?an image, ami-...}" "${TYPE:?an instance type}" "${WORK:?s3://bucket/folder or host:/path}"
if [ $# -eq 0 ]; then
    echo "ec2_spot.sh: which config? The arguments are those of segtrain train" >&2
    exit 2
fi
if [ "$count" -gt 1 ] && [[ $WORK == s3://* ]]; then
    echo "ec2_spot.sh: WORK: several machines need a folder that they share, host:/path" >&2
    exit 2
fi

boot=$(mktemp)
trap 'rm -f "$boot"' EXIT
{
    echo '#!/bin/bash'
    printf 'work=%q\n' "$WORK"
    printf 'arguments=('
    printf '%q ' "$@"
    printf ')\n'
    cat "$here/ec2_boot.sh"
} > "$boot"

options=(--image-id "$IMAGE" --instance-type "$TYPE" --count "$count" --user-data "file://$boot")
options+=(--metadata-options HttpTokens=required)
# A persistent request: what is stopped is started again.
options+=(--instance-market-options 'MarketType=spot,SpotOptions={SpotInstanceType=persistent,InstanceInterruptionBehavior=stop}')
options+=(--block-device-mappings "DeviceName=/dev/sda1,Ebs={VolumeSize=${DISK:-100},VolumeType=gp3}")
options+=(--tag-specifications 'ResourceType=instance,Tags=[{Key=Name,Value=segtrain}]')
[ -z "${PROFILE:-}" ] || options+=(--iam-instance-profile "Name=$PROFILE")
[ -z "${SUBNET:-}" ] || options+=(--subnet-id "$SUBNET")
[ -z "${GROUP:-}" ] || options+=(--security-group-ids "$GROUP")
aws ec2 run-instances "${options[@]}" --query 'Instances[].[InstanceId,SpotInstanceRequestId]' --output text

# The first start of a machine of ec2_spot.sh, which puts `work` and `arguments` above this: installs
# segtrain, and a service that trains now and after each later start.
set -euo pipefail

# 1. The folder with wheel, data, config and runs.
apt-get -o DPkg::Lock::Timeout=300 update
apt-get -o DPkg::Lock::Timeout=300 install --yes python3-venv nfs-common g++
mkdir -p /work
if [[ $work == s3://* ]]; then
    aws s3 sync --only-show-errors "$work" /work
    chown -R ubuntu: /work
else
    echo "$work /work nfs4 nfsvers=4.1,hard,timeo=600,retrans=2,_netdev 0 0" >> /etc/fstab
    mount /work
fi
mkdir -p /work/runs
chown ubuntu: /work/runs

# 2. segtrain.
python3 -m venv /opt/segtrain
/opt/segtrain/bin/pip install /work/*.whl

# 3. What tells that the machine is about to be taken away: AWS does so two minutes before.
cat > /opt/segtrain/metadata <<'END'
#!/bin/bash
# One value of the machine's metadata; fails where there is none.
service=http://169.254.169.254/latest
token=$(curl -sf -m 2 -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' $service/api/token)
curl -sf -m 2 -H "X-aws-ec2-metadata-token: $token" "$service/meta-data/$1"
END

# 4. The training, and what happens when it stops.
cat > /opt/segtrain/start <<END
#!/bin/bash
exec /opt/segtrain/bin/segtrain train $(printf '%q ' "${arguments[@]}") --resume \\
    --notice '/opt/segtrain/metadata spot/instance-action'
END
cat > /opt/segtrain/stop <<END
#!/bin/bash
work=$(printf '%q' "$work")
END
cat >> /opt/segtrain/stop <<'END'
id=$(/opt/segtrain/metadata instance-id)
journalctl --unit segtrain --boot > "/work/runs/$id.log"
[[ $work != s3://* ]] || aws s3 sync --only-show-errors /work/runs "$work/runs"
case $EXIT_STATUS in
    130 | 143) exit 0 ;; # it goes on when the machine starts again
    6) # it goes on in 30 s, but not for ever: the others may have come to the end of the run
        restarts=$(systemctl show --property=NRestarts --value segtrain)
        [ "$restarts" -ge 20 ] || exit 0 ;;
esac
# The run is complete, or cannot go on. Without its request, the machine stays off.
region=$(/opt/segtrain/metadata placement/region)
request=$(aws ec2 describe-instances --region "$region" --instance-ids "$id" --output text \
    --query 'Reservations[0].Instances[0].SpotInstanceRequestId')
aws ec2 cancel-spot-instance-requests --region "$region" --spot-instance-request-ids "$request"
systemctl poweroff
END
chmod +x /opt/segtrain/metadata /opt/segtrain/start /opt/segtrain/stop

cat > /etc/systemd/system/segtrain.service <<'END'
[Unit]
Description=segtrain
Wants=network-online.target
After=network-online.target remote-fs.target
RequiresMountsFor=/work

[Service]
User=ubuntu
WorkingDirectory=/work
ExecStart=/opt/segtrain/start
# As root, which may switch the machine off.
ExecStopPost=+/opt/segtrain/stop
TimeoutStopSec=100
# A lost connection or a dead process (6) may go well the next time; other errors do not.
Restart=on-failure
RestartSec=30
RestartPreventExitStatus=1 2 3 4 5 7 130 143

[Install]
WantedBy=multi-user.target
END
systemctl daemon-reload
systemctl enable --now segtrain.service

"""The first 200 training samples from the disk and from an S3 server on this machine.

python tools/bench_storage.py runs/storage
"""

import os
import shutil
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path

import boto3
import cv2
from commands import DEMO, draw_scenes, segtrain, settings

from segtrain.config import Config, load_config
from segtrain.data import open_dataset
from segtrain.data.sample.loader import TrainLoader
from segtrain.data.sample.stream import TrainStream
from segtrain.data.sample.transforms import TrainTransform
from segtrain.files.mirror import cache_folder

SAMPLES, BATCH, WORKERS = 200, 4, 2
URL = "http://127.0.0.1:5599"
COLUMNS = ("", "first batch", "samples/s after it", "fetched", "SHA-256")


def main(here: Path) -> None:
    shutil.rmtree(here, ignore_errors=True)
    data = draw_scenes(here / "set", 60, 4, (512, 1024))
    segtrain("data", "pack", DEMO, "--output", here / "pack", *settings(data__root=data))
    keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "key", "AWS_ENDPOINT_URL": URL}
    os.environ |= keys | {"AWS_DEFAULT_REGION": "us-east-1", "SEGTRAIN_CACHE": str(here / "cache")}
    words = [sys.executable, "-m", "moto.server", "-p", URL.rpartition(":")[2]]
    server = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    try:
        time.sleep(8)
        boto3.client("s3").create_bucket(Bucket="bench")
        for path in (path for path in here.rglob("*") if path.is_file()):
            boto3.client("s3").upload_file(str(path), "bench", str(path.relative_to(here)))
        print("|".join(("", *COLUMNS, "")), "|---" * len(COLUMNS) + "|", sep="\n")
        pack = {"data__root": "s3://bench/none", "data__pack": "s3://bench/pack"}
        for name, places in (
            ("disk, files", {"data__root": data}),
            ("S3, files", {"data__root": "s3://bench/set"}),
            ("S3, files, in the cache", {"data__root": "s3://bench/set"}),
            ("disk, pack", {"data__root": data, "data__pack": here / "pack"}),
            ("S3, pack", pack),
            ("S3, pack, in the cache", pack),
        ):
            config = load_config(DEMO, settings(**places)[1::2])
            print(f"| {name} | {measured(config)} |", flush=True)
    finally:
        server.terminate()


def measured(config: Config) -> str:
    began, before, digest, first_s = time.perf_counter(), fetched(), sha256(), 0.0
    dataset = open_dataset(config.data, "train")
    transform = TrainTransform(config.augment, form=dataset.form)
    stream = TrainStream(dataset, transform, stream_seed=0, batch_size=BATCH)
    options = {"steps": SAMPLES // BATCH, "num_workers": WORKERS, "pin_memory": False}
    for batch in TrainLoader(stream, indices=[range(BATCH)], start_step=0, timeout_s=99, **options):
        first_s = first_s or time.perf_counter() - began
        digest.update(batch.images.numpy().tobytes() + batch.labels.numpy().tobytes())
    rate = (SAMPLES - BATCH) / (time.perf_counter() - began - first_s)
    mb = (fetched() - before) / 1e6
    return f"{first_s:.1f} s | {rate:.0f} | {mb:.0f} MB | {digest.hexdigest()[:8]}"


def fetched() -> int:
    return sum(512 * path.stat().st_blocks for path in cache_folder("data").rglob("*"))


if __name__ == "__main__":
    cv2.setNumThreads(1)
    main(Path(sys.argv[1]).resolve())

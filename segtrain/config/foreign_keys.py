"""What to write instead of keys of semseg, mmsegmentation, torchvision and others."""

_FOREIGN_KEYS = {
    "the class file in data.classes decides it": "num_classes class_names ignore_index",
    "the length is train.steps; an epoch is images / train.batch_size steps": "epochs num_epochs",
    "did you mean train.steps?": "max_iters iters",
    "did you mean train.lr?": "learning_rate base_lr",
    "train.batch_size counts over all ranks": "batch_size_per_gpu samples_per_gpu",
    "did you mean data.num_workers?": "workers",
    "did you mean train.precision?": "amp fp16",
    "did you mean norm.kind?": "sync_bn",
    "did you mean train.init_from?": "load_from",
    "did you mean eval.flip?": "tta",
    "the number of processes is an option of the command: --nproc": "gpus",
    "the run directory is an option of the command: --output": "output_dir work_dir",
    "resuming is an option of the command: --resume": "resume",
    "did you mean model.backbone?": "layers encoder",
    "did you mean train.min_lr?": "eta_min",
    "did you mean train.cycle_rise?": "pct_start",
    "did you mean train.milestones?": "lr_steps lr_step",
    "did you mean train.layers?": "paramwise_cfg custom_keys frozen_stages",
    "there is no inheritance; a file says what differs from the defaults": "_base_ defaults",
}
FOREIGN_KEYS = {key: text for text, keys in _FOREIGN_KEYS.items() for key in keys.split()}

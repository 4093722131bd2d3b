"""The commands of the desk, a file each; `segtrain.cli.table` names them."""

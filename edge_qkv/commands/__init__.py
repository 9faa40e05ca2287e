"""The commands of `edge-qkv`, a file each: what options they take and what they do with them."""

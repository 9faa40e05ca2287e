from edge_qkv.errors import InputError
def parse_size(x, what): return int(x)

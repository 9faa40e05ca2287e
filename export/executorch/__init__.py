"""ExecuTorch packages: the program and the weights as torchao stores them."""

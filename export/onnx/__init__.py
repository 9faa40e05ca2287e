"""ONNX packages: the graph, the operator's function, the weights, and a plain ONNX Runtime for checks."""

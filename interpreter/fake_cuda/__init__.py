"""An emulated CUDA device on the CPU: `pretend_cuda`.

`world`: the context; `tensors`: `torch.Tensor` and factories; `torch_cuda`: `torch.cuda`, streams, autocast and others;
`random`: the GPU's random numbers; `driver`: Triton's driver.
"""

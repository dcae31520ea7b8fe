"""Functions that every rank of a torch.distributed group calls with its part of the tensors, with gradients.

In: the rank's part of an op's tensors, and the group (the default one where left out). Out: the whole result, the same
bits on every rank, or the rank's part of it. Sums between ranks are float32 unless ``wire`` says otherwise. Their
contracts stand in ``configs/contracts/parallel.toml``; `assay.verify.examination.distributed` examines them.
collectives · all_reduce · linear · moe.
"""

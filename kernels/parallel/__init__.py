"""Tensor- and expert-parallel layers with gradients, which every rank of a torch.distributed group calls.

They take a rank's shards of an op's tensors, and the group, by default torch's default group. They return the whole
result, the same bits on every rank, or the rank's shard of it. Ranks add in float32 unless ``wire`` says otherwise.
Contracts: ``configs/contracts/parallel.toml``; `assay.verify.examination.distributed` examines them.
"""

"""A rank under torchrun: all-reduce over gloo, for ever."""

from __future__ import annotations

import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
data = torch.ones(1 << 16)
count = 0
while True:
    dist.all_reduce(data)
    data.fill_(1.0)
    count += 1
    if count == 20:
        print("reduced", flush=True)  # noqa: T201  (what the test waits for)

#!/usr/bin/env python3
"""Times torch._grouped_mm on the cases that `gpu --cases` prints, for `gpu --peers`.

usage: grouped_mm.py CASES.json > PEERS.json

Needs PyTorch with CUDA. bf16, as torch has no other grouped product. Weights lie as nn.Linear keeps
them ([experts, out, in]), which is the layout that torch's kernel reads fastest.
"""

import json
import statistics
import sys

if len(sys.argv) != 2 or sys.argv[1] in ("-h", "--help"):
    sys.exit(__doc__)

import torch  # noqa: E402


def seconds(run):
    """Median over five samples of as many runs as take 40 ms."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()

    def sample(runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(runs):
            run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3 / runs

    runs = max(1, min(200, int(0.04 / sample(1))))
    return statistics.median(sample(runs) for _ in range(5))


def products(case):
    """The four products of a case by name, as functions."""
    width, hidden, counts = case["d_model"], case["d_expert"], case["counts"]
    rows, experts = sum(counts), len(counts)

    def random(*shape):
        return torch.rand(shape, device="cuda", dtype=torch.bfloat16) * 2 - 1

    offsets = torch.tensor(counts, device="cuda").cumsum(0).to(torch.int32)
    x, activation, grad = random(rows, width), random(rows, hidden), random(rows, 2 * hidden)
    gate_up = random(experts, 2 * hidden, width).transpose(-2, -1)
    down = random(experts, width, hidden).transpose(-2, -1)

    def swiglu():
        gate, up = torch._grouped_mm(x, gate_up, offs=offsets).chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    return {
        "swiglu": swiglu,
        "plain": lambda: torch._grouped_mm(activation, down, offs=offsets),
        "data_grad": lambda: torch._grouped_mm(grad, gate_up.transpose(-2, -1), offs=offsets),
        "weight_grad": lambda: torch._grouped_mm(x.t(), grad, offs=offsets),
    }


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        cases = json.load(file)
    found = []
    for case in cases:
        for kernel, run in products(case).items():
            row = {"case": case["name"], "dtype": "bf16", "kernel": kernel, "name": "torch"}
            try:
                row |= {"seconds": seconds(run), "detail": ""}
            except RuntimeError as error:
                row |= {"seconds": None, "detail": str(error).splitlines()[0]}
            found.append(row)
            print(f"torch: {case['name']}, {kernel}: {row['seconds']}", file=sys.stderr)
        torch.cuda.empty_cache()
    print(json.dumps({"version": f"torch {torch.__version__}", "rows": found}))


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("grouped_mm.py: torch finds no CUDA device")
    if not hasattr(torch, "_grouped_mm"):
        sys.exit(f"grouped_mm.py: torch {torch.__version__} has no _grouped_mm")
    main()

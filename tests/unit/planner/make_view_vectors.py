#!/usr/bin/env python3
"""Writes data/views.json: view specs with what numpy says about them. Needs numpy.

Each case is a view file with one buffer of 2-byte elements, its tensors, and per part the buffer's
element numbers in the part's row-major order. Run again only to add cases: the seed is fixed.
"""
import json
import math
import os
import random

import numpy as np


def steps_for(rng, view):
    """A random chain of steps on a numpy view: (steps, resulting view)."""
    steps = []
    for _ in range(rng.randint(0, 4)):
        d = rng.randrange(view.ndim) if view.ndim else 0
        kind = rng.choice(["narrow", "select", "permute", "split"])
        if view.ndim == 0:
            break
        n = view.shape[d]
        index = [slice(None)] * view.ndim
        signed = d - view.ndim if rng.random() < 0.3 else d
        if kind == "narrow":
            start = rng.randrange(n)
            step = rng.randint(1, 3)
            length = rng.randint(1, (n - 1 - start) // step + 1)
            index[d] = slice(start, start + (length - 1) * step + 1, step)
            view = view[tuple(index)]
            steps.append(["narrow", signed, start, length] + ([step] if step > 1 or rng.random() < 0.5 else []))
        elif kind == "select" and view.ndim > 1:
            i = rng.randrange(n)
            index[d] = i
            view = view[tuple(index)]
            steps.append(["select", signed, i])
        elif kind == "permute":
            order = list(range(view.ndim))
            rng.shuffle(order)
            view = view.transpose(order)
            steps.append(["permute", order])
        elif kind == "split":
            factors = [f for f in range(1, n + 1) if n % f == 0]
            f = rng.choice(factors)
            sizes = [f, n // f]
            # numpy may copy when it reshapes; as_strided splits one dimension without
            shape = view.shape[:d] + tuple(sizes) + view.shape[d + 1:]
            strides = view.strides[:d] + (view.strides[d] * (n // f), view.strides[d]) + view.strides[d + 1:]
            view = np.lib.stride_tricks.as_strided(view, shape, strides)
            steps.append(["split", signed, sizes])
    return steps, view


def buffer_of(rng):
    shape = [rng.choice([2, 3, 4, 6, 8, 12]) for _ in range(rng.randint(1, 4))]
    return shape, np.arange(math.prod(shape)).reshape(shape)


def entry(name, shape):
    return {"name": name, "dtype": "bf16", "shape": list(shape)}


def case_one(rng):
    shape, buffer = buffer_of(rng)
    steps, view = steps_for(rng, buffer)
    dims = list(view.shape)
    if len(dims) > 1 and rng.random() < 0.3:            # the tensor sees two dimensions as one
        i = rng.randrange(len(dims) - 1)
        dims[i:i + 2] = [dims[i] * dims[i + 1]]
    low = [rng.randint(0, 3) for _ in dims]
    box = [[a, a + n] for a, n in zip(low, dims)]
    tensor = [b + rng.randint(0, 2) for _, b in box]
    view_spec = {"buffer": "buf", "steps": steps, "part": {"tensor": "t0", "box": box}}
    return shape, [entry("t0", tensor)], view_spec, [("t0", box, view.reshape(-1))]


def whole(shape):
    return [[0, n] for n in shape]


def case_many(rng, fill):
    """Buffers filled by several tensors along one dimension."""
    count = rng.randint(2, 3)
    d = rng.randrange(2)
    other = rng.randint(1, 4)
    if fill == "concatenate":
        sizes = [rng.randint(1, 5) for _ in range(count)]
        total = sum(sizes)
        index = np.split(np.arange(total), np.cumsum(sizes)[:-1])
        extra = {}
    elif fill == "interleave":
        block, turns = rng.randint(1, 3), rng.randint(1, 4)
        total = block * turns * count
        index = [np.arange(total).reshape(turns, count, block)[:, i, :].reshape(-1) for i in range(count)]
        extra = {"block": block}
    else:
        rows, groups = [rng.randint(1, 3) for _ in range(count)], rng.randint(1, 4)
        total = sum(rows) * groups
        edges = np.cumsum([0] + rows)
        grid = np.arange(total).reshape(groups, sum(rows))
        index = [grid[:, edges[i]:edges[i + 1]].reshape(-1) for i in range(count)]
        extra = {}
    shape = [total, other] if d == 0 else [other, total]
    buffer = np.arange(total * other).reshape(shape)
    parts, tensors, expect = [], [], []
    for i, where in enumerate(index):
        view = np.take(buffer, where, axis=d)
        part = {"tensor": f"t{i}"}
        if fill == "segments":
            part["rows"] = rows[i]
        parts.append(part)
        tensors.append(entry(f"t{i}", view.shape))
        expect.append((f"t{i}", whole(view.shape), view.reshape(-1)))
    return shape, tensors, {"buffer": "buf", fill: {"dim": d, **extra, "parts": parts}}, expect


def main():
    rng = random.Random(1)
    cases = []
    for i in range(240):
        make = [case_one, case_one, case_one, lambda r: case_many(r, "concatenate"),
                lambda r: case_many(r, "interleave"), lambda r: case_many(r, "segments")][i % 6]
        shape, tensors, view, expect = make(rng)
        cases.append({
            "views": {"format": "tensorbus-views-1", "buffers": [dict(entry("buf", shape), offset=6)], "views": [view]},
            "tensors": tensors,
            "expect": [{"tensor": t, "box": box, "elements": [int(x) for x in flat]} for t, box, flat in expect]})
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data", "views.json")
    with open(path, "w") as f:
        f.write("[" + ",\n".join(json.dumps(c, separators=(",", ":")) for c in cases) + "]\n")


if __name__ == "__main__":
    main()

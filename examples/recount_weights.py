"""Counts again which bits a vLLM server loaded, from the files of its version. Needs numpy and zstandard alone.

python examples/recount_weights.py DIRECTORY URL        while the run goes on; the exit status is 0 if all tensors agree

DIRECTORY has the versions of the run: rljax-weights-* in its rollout.transfer_dir. A server that asks for a key gets
the one in the file that RLJAX_API_KEY_FILE names.
"""

import json
import os
import sys
import urllib.request
from pathlib import Path

import numpy as np
from read_weights import read

MODULUS = 2**32


def mixed(values, multiplier, another):
    """Shifts and multiplies integers of 32 bits."""
    values = (values ^ values >> 16) * np.uint32(multiplier)
    values = (values ^ values >> 15) * np.uint32(another)
    return values ^ values >> 16


def counted(bits):
    """Returns the number of elements of a whole tensor, and the three sums of its checksum."""
    first = mixed(bits.astype(np.uint32), 0x7FEB352D, 0x846CA68B)
    second = mixed(first, 0x2C1B3C6D, 0x297A2D39)
    places = np.arange(bits.size, dtype=np.uint32) * np.uint32(0x9E3779B1)
    placed = first * (places ^ places >> 15 | np.uint32(1))
    return [bits.size, *(int(each.sum(dtype=np.uint64)) % MODULUS for each in (first, second, placed))]


def loaded(url):
    """Returns the checksums that each worker of the server took of its parameters just before it packed them."""
    headers = {"Content-Type": "application/json"}
    if "RLJAX_API_KEY_FILE" in os.environ:
        headers["Authorization"] = f"Bearer {Path(os.environ['RLJAX_API_KEY_FILE']).read_text().strip()}"
    asked = json.dumps({"method": "rljax_checksums"}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{url}/collective_rpc", asked, headers)) as reply:
        return json.load(reply)["results"]


def agrees(expected, held):
    """Returns whether the workers hold a tensor: all of it each, or parts whose first two sums add up to it."""
    if any(sums is None for sums in held):
        return False
    if all(sums[0] == expected[0] for sums in held):
        return all(sums == expected for sums in held)
    count, first, second, _ = (sum(each) for each in zip(*held, strict=True))
    copies, left = divmod(count, expected[0])  # key and value heads that several workers have
    return not left and [first % MODULUS, second % MODULUS] == [copies * each % MODULUS for each in expected[1:3]]


def main(directory, url):
    """Compares the checksums and names the tensors that differ."""
    workers = loaded(url)
    (tag,) = {worker["tag"] for worker in workers}
    versions = {json.loads(path.read_text())["tag"]: path.parent for path in Path(directory).glob("v*/version.json")}
    if tag not in versions:
        sys.exit(f"{directory} has no version {tag!r}, which {url} holds; it has {', '.join(sorted(versions))}")
    _, tensors = read(Path(directory), versions[tag].name)
    wrong = [
        name
        for name, bits in tensors.items()
        if not agrees(counted(bits), [worker["tensors"].get(name) for worker in workers])
    ]
    elements = sum(bits.size for bits in tensors.values())
    print(f"{tag}: {len(tensors)} tensors, {elements} elements, {len(workers)} workers; {len(wrong)} differ")
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main(*sys.argv[1:])

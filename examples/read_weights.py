"""Reads the weights of one version, applying the deltas since the newest dense one. Needs numpy and zstandard.

python examples/read_weights.py DIRECTORY VERSION        prints each tensor's shape and the sum of its bits

Files that other processes serve are requested with the key in the file that RLJAX_API_KEY_FILE names.
"""

import json
import os
import sys
import urllib.request
from pathlib import Path

import numpy as np
import zstandard


def content_of(version, file, directory):
    """Returns the bytes of a file of a version, from its directory or from the server that its record names."""
    if not (at := version["files"][file].get("at")):
        return np.fromfile(directory / file, np.uint8)
    key = Path(os.environ["RLJAX_API_KEY_FILE"]).read_text().strip() if "RLJAX_API_KEY_FILE" in os.environ else ""
    wanted = urllib.request.Request(f"{at}/{version['name']}/{file}", headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(wanted) as reply:
        return np.frombuffer(reply.read(), np.uint8)


def entries(data):
    """Returns the bytes of each entry of a safetensors file by its key."""
    start = 8 + int.from_bytes(data[:8].tobytes(), "little")
    offsets = {key: entry["data_offsets"] for key, entry in json.loads(data[8:start].tobytes()).items()}
    return {key: data[start + first : start + last] for key, (first, last) in offsets.items()}


def unpacked(content, dtype):
    """Returns the integers that were laid out byte by byte, all lowest bytes first, and compressed."""
    planes = np.frombuffer(zstandard.ZstdDecompressor().decompress(content.tobytes()), np.uint8)
    return np.ascontiguousarray(planes.reshape(dtype.itemsize, -1).T).view(dtype).reshape(-1)


def read(directory, name):
    """Returns the shapes of the version in ``directory / name``, and the bits of each tensor as a vector."""
    version = json.loads((directory / name / "version.json").read_text())
    bits = np.dtype(np.uint32 if version["dtype"] == "float32" else np.uint16)
    shapes = {tensor: tuple(record["shape"]) for tensor, record in version["tensors"].items()}
    dense = version.get("dense")
    tensors = {t: np.zeros(np.prod(s), bits) for t, s in shapes.items()} if dense else None
    tensors = tensors or read(directory, version["base"]["name"])[1]
    files = {piece["file"] for piece in dense or version["delta"]}
    content = {file: entries(content_of(version, file, directory / name)) for file in files}
    for piece in dense or version["delta"]:
        region, stored, key = piece["region"], content[piece["file"]], piece["key"]
        if dense:
            places, values = np.arange(region["rows"] * region["width"]), stored[key].view(bits)
        elif not piece.get("changed"):
            continue
        elif not piece.get("gap_type"):
            places, values = np.arange(region["rows"] * region["width"]), stored[f"{key}.values"].view(bits)
        else:
            gaps = unpacked(stored[f"{key}.gaps"], np.dtype(piece["gap_type"])).astype(np.int64)
            places, values = np.cumsum(gaps + 1) - 1, unpacked(stored[f"{key}.values"], bits)
        rows, columns = np.divmod(places, region["width"])
        tensors[piece["tensor"]][(region["row"] + rows) * region["stride"] + region["column"] + columns] = values
    return shapes, tensors


if __name__ == "__main__":
    for tensor, vector in (found := read(Path(sys.argv[1]), sys.argv[2]))[1].items():
        print(tensor, found[0][tensor], int(vector.sum(dtype=np.uint64)))

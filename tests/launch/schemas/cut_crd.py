"""Makes the schemas of this folder from the CustomResourceDefinitions of JobSet and LeaderWorkerSet.

python tests/launch/schemas/cut_crd.py CRD.yaml OUTPUT.json

The schemas omit descriptions, the status, and the templates of Jobs and pods, which kubernetes-validate checks. Objects
with known properties refuse other properties, as the API server does for ``kubectl apply``.
"""

import json
import sys
from pathlib import Path

import yaml

TEMPLATES = {"template", "leaderTemplate", "workerTemplate"}
KEPT = ("type", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "required")


def cut(schema, name=""):
    """Returns the JSON schema for an OpenAPI schema of a CRD; ``name`` is the property that it describes."""
    if name in TEMPLATES or name == "metadata":
        return {"type": "object"}
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    found = {key: schema[key] for key in KEPT if key in schema}
    if "items" in schema:
        found["items"] = cut(schema["items"])
    if isinstance(schema.get("additionalProperties"), dict):
        found["additionalProperties"] = cut(schema["additionalProperties"])
    if "properties" in schema:
        found["properties"] = {key: cut(value, key) for key, value in schema["properties"].items() if key != "status"}
        found["additionalProperties"] = False
    return found


if __name__ == "__main__":
    source, output = map(Path, sys.argv[1:])
    spec = yaml.safe_load(source.read_text(encoding="utf-8"))["spec"]
    (version,) = spec["versions"]
    made = {"$schema": "https://json-schema.org/draft/2020-12/schema", **cut(version["schema"]["openAPIV3Schema"])}
    made["properties"]["apiVersion"]["const"] = f"{spec['group']}/{version['name']}"
    made["properties"]["kind"]["const"] = spec["names"]["kind"]
    output.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")

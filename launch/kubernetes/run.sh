#!/usr/bin/env bash
# Starts trainers and vLLM servers on a Kubernetes cluster from an overlay of launch/kubernetes/overlays.
#
#   bash launch/kubernetes/run.sh OVERLAY_DIRECTORY [--dry-run]
#   bash launch/kubernetes/run.sh launch/kubernetes/overlays/paper-4b --dry-run
#
# Makes the namespace rljax and in it, once, the secret of the key that the servers ask for (32 random bytes, which go
# from openssl to kubectl and nowhere else), then applies the overlay. The same command goes on with what is there; a
# changed JobSet must be deleted first: kubectl --namespace rljax delete jobset rljax
#
# --dry-run prints the commands and the manifests, and reaches no cluster. docs/kubernetes.md says what the cluster needs.
set -euo pipefail

namespace=rljax secret=rljax-api-key overlay="" dry_run=false
die() {
  echo "run: $*" >&2
  exit 2
}

for word in "$@"; do
  case "$word" in
    -h | --help)
      sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
      exit 0
      ;;
    --dry-run) dry_run=true ;;
    -*) die "unknown option $word (see --help)" ;;
    *)
      [[ -z "$overlay" ]] || die "unexpected argument $word after the overlay $overlay"
      overlay="$word"
      ;;
  esac
done
[[ -n "$overlay" ]] || die "name an overlay, such as launch/kubernetes/overlays/paper-4b"
[[ -f "$overlay/kustomization.yaml" ]] || die "$overlay holds no kustomization.yaml"

# rendered: the overlay's objects, by whichever of the two programs is here
rendered() {
  if command -v kubectl >/dev/null 2>&1; then
    kubectl kustomize "$overlay"
  elif command -v kustomize >/dev/null 2>&1; then
    kustomize build "$overlay"
  else
    die "neither kubectl nor kustomize is on the PATH"
  fi
}

if $dry_run; then
  echo "# kubectl create namespace $namespace"
  echo "# openssl rand -hex 32 | kubectl --namespace $namespace create secret generic $secret --from-file=key=/dev/stdin"
  echo "# kubectl apply --filename -"
  rendered
  exit
fi

manifests="$(rendered)"
kubectl get namespace "$namespace" >/dev/null 2>&1 || kubectl create namespace "$namespace"
kubectl --namespace "$namespace" get secret "$secret" >/dev/null 2>&1 ||
  openssl rand -hex 32 | kubectl --namespace "$namespace" create secret generic "$secret" --from-file=key=/dev/stdin
kubectl apply --filename - <<<"$manifests"

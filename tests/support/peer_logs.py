"""A run's rows under the names of another project, as that project would log them."""

from rljax.diagnose.signals import names_of
from rljax.mismatch.names import SIGNAL_NAMES

STEPS = {"verl": "training/global_step", "trl": "step", "slime": "rollout/step", "skyrl": "trainer/global_step"}
LENGTHS = {
    "verl": "response_length/mean",
    "trl": "completions/mean_length",
    "prime_rl": "decode_len/all/mean",
    "nemo_rl": "train/mean_gen_tokens_per_sample",
    "slime": "rollout/response_len/mean",
    "skyrl": "generate/avg_num_tokens",
    "tunix": "global/train/completions/mean_length",
}
OURS = {name: names[0] for name, names in SIGNAL_NAMES["rljax"].items()}


def renamed(rows, project):
    """Returns the rows of rljax with the metrics that a project has, under its names.

    ``token_mult_prob_error`` is 1 + the mean of abs(log-ratio), to first order. A name that begins with ``-`` has the
    number with the other sign.
    """
    names = names_of(project)
    found = []
    for row in rows:
        length = LENGTHS.get(project, "response_length/mean")
        new = {STEPS.get(project, "step"): row["step"], length: row["response_length/mean"]}
        for ours, theirs in names.items():
            if ours == "token_mult_prob_error":
                new[theirs[0]] = 1 + row["mismatch/logprob_abs_diff_mean"]
            elif ours == "ratio_mean":
                new[theirs[0]] = 1 + row["mismatch/k3_kl"] - row["mismatch/kl"]
            elif f"mismatch/{ours}" in row:
                sign = -1 if theirs[-1].startswith("-") else 1
                new[theirs[-1].removeprefix("-")] = sign * row[f"mismatch/{ours}"]
        pairs = ((theirs[0], row.get(OURS.get(name))) for name, theirs in SIGNAL_NAMES[project].items())
        new |= {theirs: value for theirs, value in pairs if value is not None}
        found.append(new)
    return found

"""XLA settings with which a program compiles in a quarter of the time, for tests that run it once or twice."""

from importlib.metadata import version

# An unknown flag ends the process, and XLA dropped the second flag with jaxlib 0.11.
FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if version("jaxlib").startswith("0.10."):
    FLAGS += " --xla_cpu_use_fusion_emitters=false --xla_cpu_opt_preset=FAST_COMPILE"

"""XLA settings under which a program compiles in a quarter of the time, for tests that run it only once or twice."""

from importlib.metadata import version

# Unknown flags end the process, and the second one left XLA with jaxlib 0.11.
FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if version("jaxlib").startswith("0.10."):
    FLAGS += " --xla_cpu_use_fusion_emitters=false --xla_cpu_opt_preset=FAST_COMPILE"

"""RL fine-tuning of language models in JAX. Each part is imported by its own name, as ``rljax.schedule``."""

DISTRIBUTION = "rljax-llm"  # the name of the installed package in the metadata


def __getattr__(name: str) -> str:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:  # the modules of a checkout, which is not installed
        return "0+unknown"

"""Configurations with other settings."""

import dataclasses


def changed(config, **sections):
    """Returns ``config`` with other settings, each as a dictionary by the name of its section."""
    parts = {name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
    return dataclasses.replace(config, **parts)

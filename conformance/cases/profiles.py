"""The two ways Hypothesis runs here: the same examples in every pull request, new and larger ones every night."""

import os
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase

PROFILE_VARIABLE = "ATTNCONFORM_HYPOTHESIS_PROFILE"  # "pr", the default, or "nightly"
DATABASE_VARIABLE = "ATTNCONFORM_HYPOTHESIS_DB"  # the directory in which nightly keeps its failures
DEFAULT_DATABASE = ".hypothesis/examples"
NIGHTLY_FACTOR = 5

# a wall-clock limit fails on somebody else's machine and says nothing about an answer
UNTIMED = (HealthCheck.too_slow,)


def register_profiles() -> None:
    """Registers `pr` and `nightly` with Hypothesis."""
    settings.register_profile("pr", derandomize=True, deadline=None, database=None, suppress_health_check=UNTIMED)
    settings.register_profile(
        "nightly",
        derandomize=False,
        deadline=None,
        database=DirectoryBasedExampleDatabase(Path(os.environ.get(DATABASE_VARIABLE, DEFAULT_DATABASE))),
        max_examples=100 * NIGHTLY_FACTOR,
        print_blob=True,
        suppress_health_check=UNTIMED,
    )


def profile_name() -> str:
    """The profile the environment asks for. Raises ValueError for any but `pr` and `nightly`."""
    name = os.environ.get(PROFILE_VARIABLE, "pr")
    if name not in ("pr", "nightly"):
        raise ValueError(f"{PROFILE_VARIABLE} is {name}, but the profiles are pr and nightly")
    return name


def load_profile() -> None:
    """Makes the asked-for profile the default of every test collected after this call."""
    register_profiles()
    settings.load_profile(profile_name())


def examples(count: int) -> int:
    """`count` examples in a pull request, NIGHTLY_FACTOR times as many every night."""
    return count * NIGHTLY_FACTOR if profile_name() == "nightly" else count


def is_nightly() -> bool:
    """Whether larger structures and more of them are wanted."""
    return profile_name() == "nightly"

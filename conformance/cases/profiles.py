"""The ways Hypothesis runs here: the same examples in every pull request, new and more every night, and the hunt.

ATTNCONFORM_HYPOTHESIS_PROFILE picks one, ATTNCONFORM_HYPOTHESIS_DB says where failures are kept.
"""

import math
import os
from importlib import import_module
from pathlib import Path
from typing import Literal, get_args

from hypothesis import HealthCheck, Phase, currently_in_test_context, settings, target
from hypothesis.database import (
    DirectoryBasedExampleDatabase,
    ExampleDatabase,
    GitHubArtifactDatabase,
    MultiplexedDatabase,
    ReadOnlyDatabase,
)

Profile = Literal["pr", "nightly", "hunt"]
PROFILES: tuple[Profile, ...] = get_args(Profile)
PROFILE_VARIABLE = "ATTNCONFORM_HYPOTHESIS_PROFILE"
DATABASE_VARIABLE = "ATTNCONFORM_HYPOTHESIS_DB"  # a directory, github:OWNER/REPOSITORY or redis://HOST:PORT/NUMBER
DEFAULT_DATABASE = ".hypothesis/examples"
# times the examples of a pull request
FACTORS: dict[Profile, int] = {"pr": 1, "nightly": 5, "hunt": 20}
EXAMPLES = 100

# a wall-clock limit fails on somebody else's machine and says nothing about an answer
UNTIMED = (HealthCheck.too_slow,)


def register_profiles() -> None:
    """Registers all profiles with Hypothesis."""
    settings.register_profile("pr", derandomize=True, deadline=None, database=None, suppress_health_check=UNTIMED)
    for name in ("nightly", "hunt"):
        settings.register_profile(
            name,
            derandomize=False,
            deadline=None,
            database=database_at(os.environ.get(DATABASE_VARIABLE) or DEFAULT_DATABASE),
            max_examples=EXAMPLES * FACTORS[name],
            phases=[phase for phase in Phase if name == "nightly" or phase is not Phase.explain],
            print_blob=True,
            suppress_health_check=UNTIMED,
        )


def database_at(place: str) -> ExampleDatabase:
    """Where examples that failed are kept. Raises ValueError for a place that is none.

    The artifacts of a repository's workflows are only read: what fails here is kept in the default directory too,
    which the workflow uploads as the artifact `hypothesis-example-db`.
    """
    scheme, has_scheme, rest = place.partition(":")
    if not has_scheme or len(scheme) == 1:  # C:\... is a directory
        return DirectoryBasedExampleDatabase(Path(place))
    if scheme == "github":
        owner, has_name, name = rest.partition("/")
        if owner and has_name and name and "/" not in name:
            shared = ReadOnlyDatabase(GitHubArtifactDatabase(owner, name))
            return MultiplexedDatabase(DirectoryBasedExampleDatabase(Path(DEFAULT_DATABASE)), shared)
    if scheme in ("redis", "rediss"):
        return redis_database(place)
    known = "a directory, github:OWNER/REPOSITORY or redis://HOST:PORT/NUMBER"
    raise ValueError(f"{DATABASE_VARIABLE} is {place}, but must be {known}")


def redis_database(url: str) -> ExampleDatabase:
    """Examples in a Redis. Raises ValueError where the package is missing or the address is none."""
    try:
        client = import_module("redis").Redis
        from hypothesis.extra.redis import RedisExampleDatabase
    except ImportError:
        raise ValueError(f"{DATABASE_VARIABLE} is {url}, which needs the package redis") from None
    try:
        return RedisExampleDatabase(client.from_url(url))
    except ValueError as error:
        raise ValueError(f"{DATABASE_VARIABLE} is {url}: {error}") from None


def profile_name() -> Profile:
    """The profile the environment asks for. Raises ValueError for any other."""
    asked = os.environ.get(PROFILE_VARIABLE) or "pr"
    for name in PROFILES:
        if name == asked:
            return name
    raise ValueError(f"{PROFILE_VARIABLE} is {asked}, but the profiles are {', '.join(PROFILES)}")


def load_profile() -> None:
    """Makes the asked-for profile the default of every test collected after this call."""
    register_profiles()
    settings.load_profile(profile_name())


def examples(count: int) -> int:
    """`count` examples in a pull request, FACTORS times as many otherwise."""
    return count * FACTORS[profile_name()]


def is_nightly() -> bool:
    """Whether larger structures and more of them are wanted."""
    return profile_name() != "pr"


def aim(ratio: float, label: str) -> None:
    """Tells the hunt how near an example came to its bound, so that it goes on from the nearest ones."""
    if profile_name() == "hunt" and currently_in_test_context() and math.isfinite(ratio):
        target(float(ratio), label=label)

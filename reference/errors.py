"""What a plan raises when it refuses an input."""


class RefusedInput(ValueError):
    """An input the contract refuses, named before anything is launched. [SAFE-REFUSE]

    `name[index] is value, but limit [CLAUSE]` is the whole message; the parts are attributes.
    """

    def __init__(self, clause: str, name: str, value: object, limit: str, index: tuple[int, ...] | None = None) -> None:
        self.clause, self.name, self.value, self.limit, self.index = clause, name, value, limit, index
        place = "" if index is None else f"[{', '.join(str(i) for i in index)}]"
        super().__init__(f"{name}{place} is {value}, but {limit} [{clause}]")

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.clause, self.name, self.value, self.limit, self.index)

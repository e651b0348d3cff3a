"""What a plan or a run raises when it refuses an input."""


class PlanError(ValueError):
    """An input refused before anything is launched: `name[index] is value, but limit [CLAUSE]`.

    The parts are attributes; `index` is None where the value is not an element of an array.
    """

    def __init__(self, clause: str, name: str, value: object, limit: str, index: tuple[int, ...] | None = None) -> None:
        self.clause, self.name, self.value, self.limit, self.index = clause, name, value, limit, index
        place = "" if index is None else f"[{', '.join(str(i) for i in index)}]"
        super().__init__(f"{name}{place} is {value}, but {limit} [{clause}]")

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.clause, self.name, self.value, self.limit, self.index)

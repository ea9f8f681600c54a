"""What a learner keeps on disk."""


def save(learner: object, folder: object) -> None:
    raise NotImplementedError


def load(learner: object, folder: object) -> None:
    raise NotImplementedError

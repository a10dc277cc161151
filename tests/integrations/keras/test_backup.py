"""`fit` killed within a window and restarted: Keras' BackupAndRestore, and a correct alternative."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from gradcombine.integrations.keras import Accumulate
from tests.integrations.keras.cases import bits, linear

pytestmark = pytest.mark.full

PER_EPOCH, EPOCHS, EVERY = 8, 2, 3
"""Epochs end within a window."""
X = np.random.default_rng(0).normal(size=(2 * PER_EPOCH, 2)).astype(np.float32)
Y = np.sin(X).sum(1, keepdims=True)


class KilledError(Exception):
    pass


class KillAfter(keras.callbacks.Callback):
    """Simulates a kill after `last` microbatches of this run."""

    def __init__(self, last: int | None) -> None:
        super().__init__()
        self.last, self.seen = last, count(1)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if next(self.seen) == self.last:
            raise KilledError


def made() -> Any:
    return linear(Accumulate(keras.optimizers.SGD(0.1, momentum=0.5), EVERY))


def microbatches(model: Any) -> int:
    """Number of microbatches seen, which Keras saves with the optimizer."""
    return int(model.optimizer.variables[0])


def fit(model: Any, callbacks: list[Any], begin: int = 0, end: int = PER_EPOCH * EPOCHS) -> None:
    """Runs `fit` over the microbatches from `begin` to `end`, with the usual epoch boundaries."""
    while begin < end:
        epoch, first = divmod(begin, PER_EPOCH)
        rest, settings = slice(2 * first, None), {"batch_size": 2, "shuffle": False, "verbose": 0}
        last = epoch + 1 if first else EPOCHS
        model.fit(X[rest], Y[rest], initial_epoch=epoch, epochs=last, callbacks=callbacks, **settings)
        begin = last * PER_EPOCH


def unbroken() -> Any:
    model = made()
    fit(model, [])
    assert microbatches(model) == PER_EPOCH * EPOCHS
    return bits(model.variables), bits(model.optimizer.variables)


def with_backup(folder: Path, save_freq: Any, last: int | None) -> Any:
    model = made()
    model.build((None, 2))
    backup = keras.callbacks.BackupAndRestore(str(folder), save_freq=save_freq)
    fit(model, [backup, KillAfter(last)])
    return model


@pytest.mark.parametrize("last", [PER_EPOCH + 1, PER_EPOCH + 5])
def test_backups_of_epochs_train_an_epoch_once_more_from_where_it_began(tmp_path: Path, last: int) -> None:
    """The backup contains the window that the previous epoch left open."""
    with pytest.raises(KilledError):
        with_backup(tmp_path / "backup", "epoch", last)
    model = with_backup(tmp_path / "backup", "epoch", None)
    assert (bits(model.variables), bits(model.optimizer.variables)) == unbroken()


def test_backups_of_batches_count_what_came_before_them_twice(tmp_path: Path) -> None:
    with pytest.raises(KilledError):
        with_backup(tmp_path / "backup", 2, PER_EPOCH + 5)
    model = with_backup(tmp_path / "backup", 2, None)
    # The backup was made after four microbatches of the second epoch, yet all eight were trained again.
    assert microbatches(model) == PER_EPOCH * EPOCHS + 4
    assert bits(model.variables) != unbroken()[0]


def test_backups_that_are_half_written_count_an_epoch_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are in one file and the epoch number in another, written later."""
    save = keras.Model.save_weights

    def save_and_end(*args: Any, **options: Any) -> None:
        save(*args, **options)
        raise KilledError

    monkeypatch.setattr(keras.Model, "save_weights", save_and_end)
    with pytest.raises(KilledError):
        with_backup(tmp_path / "backup", "epoch", None)
    monkeypatch.undo()
    assert microbatches(with_backup(tmp_path / "backup", "epoch", None)) == PER_EPOCH * (EPOCHS + 1)


class SaveInOneStep(keras.callbacks.Callback):
    """Saves weights and window to one file after every microbatch, with an atomic rename."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        part = self.path.with_name("part.weights.h5")
        self.model.save_weights(part)
        os.replace(part, self.path)


@pytest.mark.parametrize("last", [1, 9, 15])
def test_one_file_that_says_what_is_in_it_counts_each_microbatch_once(tmp_path: Path, last: int) -> None:
    path = tmp_path / "run.weights.h5"
    for killed_after in (last, 1, None):
        model = made()
        model.optimizer.build(model.trainable_variables)
        if path.exists():
            model.load_weights(path)
        try:
            fit(model, [KillAfter(killed_after), SaveInOneStep(path)], begin=microbatches(model))
        except KilledError:
            continue
    assert (bits(model.variables), bits(model.optimizer.variables)) == unbroken()

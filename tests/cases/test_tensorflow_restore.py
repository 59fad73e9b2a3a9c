"""A restore into what is called otherwise, or is not there yet, is never one of nothing."""

from __future__ import annotations

from pathlib import Path

from .. import quiet_tensorflow  # noqa: F401  isort: skip

import pytest
import tensorflow as tf

from unbroken.errors import StateMismatchError, UnsupportedStateError

from ..keras.scenes import dense, restore, save, values

import keras  # isort: skip


class TestUnderAnotherName:
    """The root is called otherwise, or a layer, and the weights stay random (tensorflow/tensorflow#27937)."""

    def test_plain_tensorflow_restores_nothing_and_its_status_is_content(self, tmp_path: Path) -> None:
        net, model = dense("a"), dense("a", seed=5)
        path = tf.train.Checkpoint(net=net).save(str(tmp_path / "ckpt"))
        before = values(model)
        # Because the counter of saves has matched.
        tf.train.Checkpoint(model=model).restore(path).assert_nontrivial_match().expect_partial()
        assert values(model) == before

    def test_another_name_of_the_part_is_refused_with_both(self, tmp_path: Path) -> None:
        net, model = dense("a"), dense("a", seed=5)
        save(tmp_path, net=net)
        before = values(model)
        with pytest.raises(StateMismatchError) as caught:
            restore(tmp_path, model=model)
        assert "model: the checkpoint lacks this part" in str(caught.value)
        assert "net: the program lacks this part" in str(caught.value)
        assert values(model) == before
        restore(tmp_path, model=model, rename={"net": "model"})
        assert values(model) == values(net)

    def test_renamed_layers_are_refused_with_the_map_to_say(self, tmp_path: Path) -> None:
        model, again = dense("encoder", "head"), dense("backbone", "head", seed=5)
        save(tmp_path, model=model)
        with pytest.raises(StateMismatchError, match=r"rename=\{'model\.encoder': 'model\.backbone'\}"):
            restore(tmp_path, model=again)
        restore(tmp_path, model=again, rename={"model.encoder": "model.backbone"})
        assert values(again) == values(model)

    def test_what_is_not_built_is_refused_rather_than_certified(self, tmp_path: Path) -> None:
        save(tmp_path, model=dense("a"))
        unbuilt = keras.Sequential([keras.layers.Dense(4, name="a")])
        with pytest.raises(UnsupportedStateError, match="has not been built"):
            restore(tmp_path, model=unbuilt)

"""What passes through the driver: metadata, counted; a tensor does not get through."""

import numpy as np
import pytest
import torch

from headrace.actors.train.worker import TrainShard
from headrace.codecs import messages
from headrace.trainers.cluster.handles import message_bytes


def test_messages_are_counted_by_their_bytes():
    shard = TrainShard(1, b"receipt", np.array([3, 4]), "digest", False)
    assert message_bytes(shard) == len(messages.encode(shard))
    assert message_bytes(b"12345") == 5


@pytest.mark.parametrize("smuggled", [torch.zeros(2), {"rows": torch.zeros(2)}, [torch.zeros(2)]])
def test_a_tensor_does_not_pass_the_driver(smuggled):
    with pytest.raises(TypeError, match="Tensor"):
        message_bytes(smuggled)

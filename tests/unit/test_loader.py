"""Batches: fixed shapes, 8 bits, the same whatever the number of workers."""

from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mshnet.data.augment import augment, resize
from mshnet.data.bitmask import unpack
from mshnet.data.loader import (
    BLANK,
    DataShard,
    EpochBatches,
    EvaluationSet,
    FilledBatches,
    TrainingSet,
    evaluation_loader,
    training_loader,
)
from mshnet.data.source import open_split


@pytest.fixture
def train(tiny_dataset):
    """Seven grey samples of 32×32."""
    return open_split(tiny_dataset(train=7, test=5), "train", 1, "ram")


@pytest.fixture
def test(tiny_dataset, tmp_path):
    """Five grey samples of 48×48."""
    return open_split(tiny_dataset(test=5, size=48, folder=tmp_path / "other"), "test", 1, "ram")


def epochs(store, workers=0, seed=0, count=2, batch_size=3):
    """The batches of the first epochs."""
    loader = training_loader(TrainingSet(store, 32, 32, seed), batch_size, workers)
    found = []
    for epoch in range(count):
        loader.batch_sampler.epoch = epoch
        found.append(list(loader))
    return found


def assert_same(first, second):
    for batches, others in zip(first, second, strict=True):
        for batch, other in zip(batches, others, strict=True):
            for tensor, same in zip(batch, other, strict=True):
                assert torch.equal(tensor, same)


# --- training ------------------------------------------------------------------------------------


def test_training_batches_have_one_shape_and_8_bits(train):
    batches = epochs(train)[0]
    assert len(batches) == 2  # 7 samples: the rest that does not fill a batch is dropped
    for images, masks in batches:
        assert images.shape == (3, 1, 32, 32)
        assert masks.shape == (3, 1, 4, 32)
        assert images.dtype == masks.dtype == torch.uint8


def test_a_batch_holds_the_samples_that_its_sampler_names(train):
    dataset = TrainingSet(train, 32, 32, 0)
    loader = training_loader(dataset, 3, 0)
    for keys, (images, masks) in zip(loader.batch_sampler, loader, strict=True):
        for key, image, mask in zip(keys, images, unpack(masks), strict=True):
            assert torch.equal(image, dataset[key][0])
            assert torch.equal(mask, dataset[key][1] != 0)


def test_colour_has_three_channels(tiny_dataset):
    store = open_split(tiny_dataset(train=2), "train", 3, "ram")
    image, mask = TrainingSet(store, 32, 32, 0)[0, 1]
    assert image.shape == (3, 32, 32)
    assert mask.shape == (1, 32, 32)
    assert torch.equal(image[0], image[2])


def test_the_number_of_workers_changes_nothing(train):
    alone = epochs(train, workers=0)
    assert_same(alone, epochs(train, workers=2))
    assert_same(alone, epochs(train, workers=1))


def test_the_global_random_state_changes_nothing(train):
    first = epochs(train)
    torch.manual_seed(99)
    np.random.seed(99)
    assert_same(first, epochs(train))


def test_epochs_and_seeds_differ(train):
    first, second = epochs(train)
    other = epochs(train, seed=1)[0]
    assert not torch.equal(first[0][0], second[0][0])
    assert not torch.equal(first[0][0], other[0][0])


def test_an_epoch_can_be_repeated_alone(train):
    """What a resumed run sees: epoch 1 without epoch 0 before it."""
    loader = training_loader(TrainingSet(train, 32, 32, 0), 3, 0)
    loader.batch_sampler.epoch = 1
    assert_same([list(loader)], [epochs(train)[1]])


def test_a_sample_depends_on_seed_epoch_and_index_alone(train):
    dataset = TrainingSet(train, 32, 32, seed=5)
    image, mask = dataset[3, 2]
    expected = augment(*train[2], 32, 32, np.random.default_rng([5, 3, 2]))
    np.testing.assert_array_equal(image[0], expected[0])
    np.testing.assert_array_equal(mask[0], expected[1])
    assert not torch.equal(dataset[4, 2][0], image)
    assert not torch.equal(TrainingSet(train, 32, 32, seed=6)[3, 2][0], image)


def indices(batches):
    return [index for batch in batches for _, index in batch]


@settings(max_examples=25, deadline=None)
@given(length=st.integers(1, 200), seed=st.integers(0, 2**32), epoch=st.integers(0, 500))
def test_every_index_comes_once_an_epoch(length, seed, epoch):
    batches = EpochBatches(length, 1, seed, DataShard())
    batches.epoch = epoch
    order = list(batches)
    assert len(batches) == len(order) == length
    assert {e for batch in order for e, _ in batch} == {epoch}
    assert sorted(indices(order)) == list(range(length))
    assert order == list(batches)


@settings(max_examples=50, deadline=None)
@given(
    parts=st.sampled_from([1, 2, 3, 8, 32]),
    each=st.integers(1, 5),
    length=st.integers(1, 400),
    epoch=st.integers(0, 5),
    start=st.integers(0, 3),
)
def test_the_parts_of_all_hosts_are_the_batches_of_one(parts, each, length, epoch, start):
    """Every sample that one host would train comes once, in the same global batch."""
    batch_size = parts * each
    start = min(start, length // batch_size)
    lists = []
    for part in [DataShard(), *(DataShard(i, parts) for i in range(parts))]:
        batches = EpochBatches(length, batch_size, 7, part)
        batches.epoch, batches.start = epoch, start
        lists.append(list(batches))
        assert len(batches) == len(lists[-1]) == length // batch_size - start
    whole, *hosts = lists
    assert [list(chain(*slices)) for slices in zip(*hosts, strict=True)] == whole
    seen = indices(whole)
    assert len(seen) == len(set(seen)) == len(whole) * batch_size


def test_an_interrupted_epoch_goes_on_with_the_next_batch(train):
    loader = training_loader(TrainingSet(train, 32, 32, 0), 3, 0)
    loader.batch_sampler.epoch, loader.batch_sampler.start = 1, 1
    assert len(loader) == 1
    assert_same([list(loader)], [epochs(train)[1][1:]])


def test_the_order_changes_with_epoch_and_seed():
    orders = set()
    for seed in (0, 1):
        batches = EpochBatches(30, 1, seed, DataShard())
        for batches.epoch in range(5):
            orders.add(tuple(indices(batches)))
    assert len(orders) == 10


def test_what_is_dropped_changes_from_epoch_to_epoch():
    batches = EpochBatches(7, 6, 0, DataShard())
    dropped = set()
    for batches.epoch in range(40):
        dropped |= set(range(7)) - set(indices(batches))
    assert dropped == set(range(7))


# --- evaluation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_the_last_evaluation_batch_is_filled_up_with_black(test, workers):
    loader = evaluation_loader(EvaluationSet(test, 32), 3, workers)
    batches = list(loader)
    assert len(batches) == len(loader) == 2
    for images, masks in batches:
        assert images.shape == (3, 1, 32, 32)
        assert masks.shape == (3, 1, 4, 32)
        assert images.dtype == masks.dtype == torch.uint8
    images, masks = (torch.cat(column) for column in zip(*batches, strict=True))
    masks = unpack(masks)
    for i in range(5):
        image, mask = resize(*test[i], 32)
        np.testing.assert_array_equal(images[i, 0], image)
        np.testing.assert_array_equal(masks[i, 0], mask)
    assert not images[5:].any()
    assert not masks[5:].any()


def test_full_evaluation_batches_are_left_alone(test):
    batches = list(evaluation_loader(EvaluationSet(test, 48), 5, 0))
    assert [len(images) for images, _ in batches] == [5]


def test_a_batch_larger_than_the_set_is_filled_up(test):
    ((images, _),) = evaluation_loader(EvaluationSet(test, 16), 8, 0)
    assert images.shape == (8, 1, 16, 16)
    assert images[:5].flatten(1).any(1).all()
    assert not images[5:].any()


@settings(max_examples=50, deadline=None)
@given(parts=st.sampled_from([1, 2, 8]), each=st.integers(1, 5), length=st.integers(1, 100))
def test_parts_of_an_evaluation_hold_every_sample_once_and_blanks_for_the_rest(parts, each, length):
    hosts = [list(FilledBatches(length, parts * each, DataShard(i, parts))) for i in range(parts)]
    assert {len(batches) for batches in hosts} == {-(-length // (parts * each))}
    assert all(len(batch) == each for batches in hosts for batch in batches)
    together = [i for slices in zip(*hosts, strict=True) for part in slices for i in part]
    assert together[:length] == list(range(length))
    assert set(together[length:]) <= {BLANK}

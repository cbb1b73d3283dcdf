"""Every kind of file becomes the same arrays, or a message that names it."""

import io
import os
import socket

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import EpsImagePlugin, Image

from mshnet import RequestError
from mshnet.data.decode import open_image, read_image, read_mask
from mshnet.data.scenes import render_scene

GREY = np.arange(0, 240, dtype=np.uint8).reshape(12, 20)


def saved(path, array, mode=None):
    image = Image.fromarray(array)
    (image.convert(mode) if mode else image).save(path)
    return path


def refuses(read, path, code):
    with pytest.raises(RequestError) as caught:
        read(path)
    assert caught.value.code == code
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


# --- images --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA", "P"])
def test_a_grey_picture_is_the_same_in_every_mode(tmp_path, mode):
    path = saved(tmp_path / "x.png", GREY, mode)
    assert open_image(path).mode == mode
    np.testing.assert_array_equal(read_image(path), GREY)
    np.testing.assert_array_equal(read_image(path, 3), np.stack([GREY] * 3, -1))
    assert read_image(path).dtype == np.uint8


def test_one_bit_becomes_black_and_white(tmp_path):
    path = saved(tmp_path / "x.png", GREY > 100)
    assert open_image(path).mode == "1"
    np.testing.assert_array_equal(read_image(path), np.where(GREY > 100, 255, 0))


@pytest.mark.parametrize("suffix, tolerance", [("bmp", 0), ("jpg", 8), ("JPG", 8), ("jpeg", 8)])
def test_other_formats(tmp_path, suffix, tolerance):
    smooth = np.tile(np.arange(32, dtype=np.uint8) * 4, (32, 1))
    path = saved(tmp_path / f"x.{suffix}", smooth)
    assert np.abs(read_image(path).astype(int) - smooth).max() <= tolerance


def test_colour_becomes_luma_or_stays(tmp_path):
    colours = np.zeros((2, 3, 3), np.uint8)
    colours[0] = np.eye(3) * 255  # red, green, blue
    path = saved(tmp_path / "x.png", colours)
    np.testing.assert_array_equal(read_image(path, 1)[0], [76, 150, 29])  # ITU-R 601
    np.testing.assert_array_equal(read_image(path, 3), colours)


@pytest.mark.parametrize("mode", ["LA", "RGBA"])
def test_alpha_is_dropped(tmp_path, mode):
    image = Image.fromarray(GREY).convert(mode)
    image.putalpha(Image.fromarray(GREY[::-1].copy()))
    image.save(tmp_path / "x.png")
    np.testing.assert_array_equal(read_image(tmp_path / "x.png"), GREY)


def test_16_bits_are_stretched_from_minimum_to_maximum(tmp_path):
    path = saved(tmp_path / "x.png", (1000 + 2 * GREY.astype(np.uint16)))
    assert open_image(path).mode == "I;16"
    np.testing.assert_array_equal(read_image(path), np.round(GREY / 239 * 255))
    assert read_image(path, 3).shape == (12, 20, 3)


def test_a_constant_16_bit_frame_is_black(tmp_path):
    path = saved(tmp_path / "x.png", np.full((4, 4), 9000, np.uint16))
    assert not read_image(path).any()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_pixels_that_are_no_numbers_take_no_part_in_the_stretch(tmp_path, wrong):
    """One NaN made the whole frame black."""
    values = GREY.astype(np.float32)
    values[5, 7] = wrong
    Image.fromarray(values).save(tmp_path / "x.png", "TIFF")  # PNG has no float
    expected = np.round(GREY / 239 * 255)
    expected[5, 7] = 255 if wrong == np.inf else 0
    np.testing.assert_array_equal(read_image(tmp_path / "x.png"), expected)


def test_a_frame_without_any_number_is_black(tmp_path):
    Image.fromarray(np.full((4, 4), np.nan, np.float32)).save(tmp_path / "x.png", "TIFF")
    assert not read_image(tmp_path / "x.png").any()


# --- masks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1, 7, 64, 127])
def test_below_half_is_background(tmp_path, value):
    mask, touched = read_mask(saved(tmp_path / "m.png", np.uint8([[0, value], [255, 0]])))
    np.testing.assert_array_equal(mask, [[0, 0], [1, 0]])
    assert touched


@pytest.mark.parametrize("value", [128, 253, 254])
def test_from_half_on_is_target(tmp_path, value):
    mask, touched = read_mask(saved(tmp_path / "m.png", np.uint8([[0, value], [255, 0]])))
    np.testing.assert_array_equal(mask, [[0, 1], [1, 0]])
    assert touched


@pytest.mark.parametrize("value, target", [(1, 0), (255, 0), (32767, 0), (32768, 1), (65534, 1)])
def test_16_bit_masks_are_cut_at_their_own_half(tmp_path, value, target):
    path = saved(tmp_path / "m.png", np.uint16([[0, value], [65535, 0]]))
    mask, touched = read_mask(path)
    np.testing.assert_array_equal(mask, [[0, target], [1, 0]])
    assert touched


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_a_binary_mask_is_the_same_in_every_mode(tmp_path, mode):
    binary = np.where(GREY > 200, 255, 0).astype(np.uint8)
    mask, touched = read_mask(saved(tmp_path / "m.png", binary, mode))
    np.testing.assert_array_equal(mask, GREY > 200)
    assert mask.dtype == np.uint8
    assert not touched


def test_a_binary_16_bit_mask(tmp_path):
    path = saved(tmp_path / "m.png", np.where(GREY > 200, 65535, 0).astype(np.uint16))
    mask, touched = read_mask(path)
    np.testing.assert_array_equal(mask, GREY > 200)
    assert not touched


def test_a_palette_mask_is_read_through_its_palette(tmp_path):
    image = Image.fromarray(np.uint8([[0, 1], [2, 0]]), "P")
    image.putpalette([0, 0, 0, 255, 255, 255, 0, 0, 0])
    image.save(tmp_path / "m.png")
    mask, touched = read_mask(tmp_path / "m.png")
    np.testing.assert_array_equal(mask, [[0, 1], [0, 0]])
    assert not touched


def test_transparent_target_pixels_are_targets(tmp_path):
    pixels = np.zeros((2, 2, 4), np.uint8)
    pixels[0, 0, :3] = 255
    mask, touched = read_mask(saved(tmp_path / "m.png", pixels))
    np.testing.assert_array_equal(mask, [[1, 0], [0, 0]])
    assert not touched


# --- damaged files -------------------------------------------------------------------------------


READERS = pytest.mark.parametrize("read", [read_image, read_mask])


@READERS
def test_a_truncated_png(tmp_path, read):
    path = saved(tmp_path / "x.png", GREY)
    path.write_bytes(path.read_bytes()[:-60])
    refuses(read, path, "damaged-file")


@READERS
@pytest.mark.parametrize("content", [b"this is no picture\n", b"", b"<html>not found</html>"])
def test_a_file_that_is_no_picture(tmp_path, read, content):
    path = tmp_path / "x.png"
    path.write_bytes(content)
    refuses(read, path, "damaged-file")


def test_a_missing_file(tmp_path):
    refuses(read_image, tmp_path / "x.png", "missing-file")


@READERS
def test_a_header_too_large_to_be_true(tmp_path, huge_png, read):
    (tmp_path / "x.png").write_bytes(huge_png)
    refuses(read, tmp_path / "x.png", "damaged-file")


@READERS
@pytest.mark.parametrize("kind", ["pipe", "socket", "folder", "device"])
def test_only_regular_files_are_opened(tmp_path, monkeypatch, read, kind):
    """To open a pipe waits for somebody who writes to it."""
    monkeypatch.chdir(tmp_path)  # a socket's path has at most 107 bytes
    path = tmp_path / "x.png"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind("x.png")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    refuses(read, path, "not-a-file")


def test_no_other_program_is_started(tmp_path, monkeypatch):
    """Pillow starts Ghostscript for an EPS, whatever the suffix."""
    gs = tmp_path / "gs"
    gs.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    gs.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    path = tmp_path / "x.png"
    path.write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
    )
    refuses(read_image, path, "damaged-file")
    assert not (tmp_path / "started").exists()


def flipped(content, bit):
    wrong = bytearray(content)
    wrong[bit // 8] ^= 1 << bit % 8
    return wrong


def test_every_flipped_bit_of_a_mask_is_found_or_harmless(tmp_path):
    """PNG data have checksums, which Pillow does not compare when it decodes."""
    path = saved(tmp_path / "m.png", render_scene(0, 0, 64)[1])
    content, (mask, _) = path.read_bytes(), read_mask(path)
    found = 0
    for bit in range(8 * len(content)):
        path.write_bytes(flipped(content, bit))
        try:
            np.testing.assert_array_equal(read_mask(path)[0], mask)
        except RequestError as error:
            assert str(path) in str(error)
            found += 1
    assert found > 7 * len(content)


@settings(max_examples=100, deadline=None)
@given(place=st.floats(0, 1, exclude_max=True))
def test_a_flipped_bit_of_an_image_is_found_or_harmless(tmp_path_factory, place):
    path = tmp_path_factory.mktemp("flip") / "x.png"
    scene = render_scene(0, 0, 64)[0]
    content = saved(path, scene).read_bytes()
    path.write_bytes(flipped(content, int(place * 8 * len(content))))
    try:
        np.testing.assert_array_equal(read_image(path), scene)
    except RequestError as error:
        assert str(path) in str(error)


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(["PNG", "BMP", "JPEG"]), share=st.floats(0, 1), wrong=st.binary(max_size=8)
)
def test_damage_anywhere_is_either_harmless_or_named(tmp_path_factory, kind, share, wrong):
    """Bytes are overwritten, and what follows is cut off."""
    buffer = io.BytesIO()
    Image.fromarray(GREY).save(buffer, kind)
    whole = buffer.getvalue()
    path = tmp_path_factory.mktemp("damage") / "x.png"
    path.write_bytes(whole[: int(share * len(whole))] + wrong)
    try:
        image = read_image(path)
    except RequestError as error:
        assert str(path) in str(error)
    else:
        assert (image.ndim, image.dtype) == (2, np.uint8)

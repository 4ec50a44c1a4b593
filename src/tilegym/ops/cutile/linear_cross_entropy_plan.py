"""Where ``fused_linear_cross_entropy`` has its logits, and in which slices it writes weight's gradient.

Where weight has a gradient the logits take no memory of their own: they are where that will be. The gradient [V, H] has
room for the logits of R <= H tokens, transposed: [V, R] from the start of its memory on. A chunk has so many tokens,
and the last chunk's gradients of logits stay there. Slices of weight's gradient are written over them from the last
class to the first: the logits of the classes before v end before row v of the gradient begins, so that what is still
to be read stays as it is. Where all tokens are stored, and fewer than there is room for, the logits of even more
classes end there: all but R / H of the classes are one slice, all but R / H of the others the next, and each is written
by one GEMM that reads its gradients of logits where they are. Before any other slice is written, the last few classes
or those of more tokens than R, its gradients of logits are copied to a small buffer. Those for the tokens of other
chunks are computed again into the same buffer, with the sums known. So there are 3 GEMMs for R tokens, and up to 4 for
more. In fp16, whose range sums over tokens may leave, weight's gradient is held in fp32, which gives room for twice the
tokens.

Chunks of more tokens than that, which a call may ask for, have the logits of the first classes there and those of the
others in memory of their own. Then the logits of the classes before v end behind row v: slices are written from the
first class to the last, what ends where those before it began without a copy, and the other memory's at once.
"""

# Shorter chunks leave a GPU's multiprocessors idle (hidden states' gradient, 1024x4096, is 128 tiles of 128x256); so
# many elements of logits are little beside a large model's other tensors.
FEWEST_ROWS, FEW_ELEMENTS = 1024, 2**26
# A slice that is copied has as many classes as make this many logits (of 8192 tokens: 2048, whose GEMMs are 256 tiles
# of 128x256), but no fewer than would leave multiprocessors idle.
SLICE_ELEMENTS, FEWEST_CLASSES = 2**24, 1024
CLASSES_OF_TILE = 128  # of a GEMM's result; slices are of whole tiles
# A chunk_size, the default, from which on a chunk has all tokens that there is room for: in memory that is taken anyway
# more cost nothing, and fewer logits are computed twice. Larger ones are worth more memory.
ALL_THERE_IS_ROOM_FOR = 4096
ALIGNMENT = 16  # of rows of logits, in elements, so that kernels access 16 bytes at a time


def aligned(tokens: int) -> int:
    """How many elements a row of the logits of so many tokens takes."""
    return -(-tokens // ALIGNMENT) * ALIGNMENT


def rows_of_chunk(vocabulary: int, chunk_size: int) -> int:
    """How many tokens have logits at a time, in a buffer of their own: few, but not so few that the GEMMs suffer."""
    return min(chunk_size, max(FEWEST_ROWS, FEW_ELEMENTS // max(vocabulary, 1)))


def rows_stored(tokens: int, vocabulary: int, room: int, chunk_size: int) -> tuple[int, int]:
    """How many of ``tokens`` have logits at a time where there is room for so many, and what their rows take of it."""
    asked = min(tokens, chunk_size)
    if chunk_size > ALL_THERE_IS_ROOM_FOR and room < asked <= room * vocabulary - ALIGNMENT:
        return asked, aligned(asked)
    rows = min(tokens, room) if chunk_size >= ALL_THERE_IS_ROOM_FOR else min(asked, room)
    if aligned(rows) <= room:
        return rows, aligned(rows)
    rows = room // ALIGNMENT * ALIGNMENT or rows
    return rows, rows


def classes_held(vocabulary: int, room: int, width: int) -> int:
    """How many classes have their logits, of ``width`` elements each, in the memory of weight's gradient: in whole
    tiles, unless all have."""
    held = min(vocabulary, vocabulary * room // width)
    return held if held == vocabulary else held // CLASSES_OF_TILE * CLASSES_OF_TILE or held


def classes_of_slice(tokens: int, vocabulary: int, chunk_size: int) -> int:
    """How many classes a slice that is copied has, whose logits for all tokens are to be no more than a chunk's."""
    classes = min(max(FEWEST_CLASSES, SLICE_ELEMENTS // tokens), max(1, chunk_size * vocabulary // tokens), vocabulary)
    return classes // CLASSES_OF_TILE * CLASSES_OF_TILE or classes


def direct_slices(vocabulary: int, width: int, room: int, classes: int) -> tuple[list[slice], int]:
    """Slices of weight's gradient, from the last class on, that are written without a copy; how many classes are left.

    A class takes ``width`` elements of the memory for the gradient of its logits, and ``room`` for that of weight. No
    slice lies over what it or a later one reads. So that there are no more GEMMs than with copies, a slice has no fewer
    ``classes`` than one that is copied. Where it has at least half of those that are left there are few slices anyway:
    there it may be as short as FEWEST_CLASSES, and the buffer is small.
    """
    fewest = min(classes, FEWEST_CLASSES) if 2 * width <= room else classes
    slices, end = [], vocabulary
    while True:
        start = -(-end * width // room)
        start = -(-start // CLASSES_OF_TILE) * CLASSES_OF_TILE
        if end - start < fewest:
            return slices, end
        slices.append(slice(start, end))
        end = start


def slices(vocabulary: int, held: int, width: int, room: int, classes: int, stored: bool) -> list[tuple[slice, bool]]:
    """All slices of weight's gradient in the order in which they are written, each with whether it is without a copy.

    ``held`` classes have their gradients of logits in its memory. A slice that is copied has at most so many
    ``classes``; where not all tokens' gradients are ``stored``, all slices are.
    """
    if held == vocabulary:
        direct, left = direct_slices(vocabulary, width, room, classes) if stored else ([], vocabulary)
        copied = [slice(start, min(start + classes, left)) for start in reversed(range(0, left, classes))]
        return [(rows, True) for rows in direct] + [(rows, False) for rows in copied]
    ascending, start = [], 0
    while start < held:
        # Up to here the gradient lies over gradients of logits of the classes before ``start`` alone.
        end = min(start * width // room // CLASSES_OF_TILE * CLASSES_OF_TILE, held) if stored else start
        alone = end - start >= min(classes, held - start)
        end = end if alone else min(start + classes, held)
        ascending.append((slice(start, end), alone))
        start = end
    step = vocabulary - held if stored else classes
    return ascending + [(slice(a, min(a + step, vocabulary)), stored) for a in range(held, vocabulary, step)]

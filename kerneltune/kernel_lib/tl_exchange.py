"""Exchange values between the programs of a launch: tagged words in a workspace (workspace.py)."""

import triton
import triton.language as tl

from kerneltune.kernel_lib.tl_lib import held, is_cuda, wide


@triton.jit
def launch_tag(ws_ptr):
    """Return the number of this launch on its workspace, never 0: `publish` marks its words with it."""
    return tl.load(ws_ptr.to(tl.pointer_type(tl.int32)), volatile=True).to(tl.uint32) + 1


@triton.jit
def close_launch(ws_ptr, tag):
    """Count this program out of the launch, once; the last program of the grid gives the next launch another tag."""
    arrived_ptr = ws_ptr.to(tl.pointer_type(tl.int32)) + 32
    if tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu") == tl.num_programs(0) - 1:
        tl.store(arrived_ptr, 0)
        tl.store(ws_ptr.to(tl.pointer_type(tl.uint32)), tag)


@triton.jit
def publish(ws_ptr, index, value, tag, mask):
    """Store the fp32 `value` with `tag` in a 64-bit word, which other programs of this launch can wait for."""
    if is_cuda():  # in the layout of `value`, whichever that is: `tl.store` would first move it into another
        tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            .reg .b64 w;
            mov.b64 w, {$2, $3};
            setp.ne.b32 p, $4, 0;
            @p st.relaxed.gpu.global.b64 [$1], w;
            mov.b32 $0, 0;
            }""",
            "=r,l,r,r,r", [(ws_ptr + 32 + index).to(tl.int64), value, tag, mask.to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1)  # fmt: skip
    else:
        word = (tag.to(tl.uint64) << 32) | value.to(tl.uint32, bitcast=True).to(tl.uint64)
        tl.store(ws_ptr + 32 + index, word.to(tl.int64, bitcast=True), mask=mask, cache_modifier=".cg")


@triton.jit
def load_published(ws_ptr, index):
    """Load the fp32 values that an earlier launch published, or this launch if a thread of the program waited for them."""
    if is_cuda():  # a load that Triton's pipelining cannot move before the wait for its value
        return tl.inline_asm_elementwise(
            "{ .reg .b64 w; .reg .b32 tag; ld.relaxed.gpu.global.b64 w, [$1]; mov.b64 {$0, tag}, w; }",
            "=r,l", [(ws_ptr + 32 + index).to(tl.int64)], dtype=tl.float32, is_pure=False, pack=1)  # fmt: skip
    word = tl.load(ws_ptr + 32 + index, cache_modifier=".cg").to(tl.uint64, bitcast=True)
    return (word & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def await_published(ws_ptr, index, tag):
    """Wait for the fp32 values that other programs of this launch publish under `tag`; every thread spins on its own word.

    All programs that publish them must be resident: launch cooperatively.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .b64 w;
        .reg .b32 t;
        AGAIN_${:uid}:
        ld.relaxed.gpu.global.b64 w, [$1];
        mov.b64 {$0, t}, w;
        setp.ne.b32 p, t, $2;
        @p bra AGAIN_${:uid};
        }""",
        "=&r,l,r", [(ws_ptr + 32 + index).to(tl.int64), tag], dtype=tl.float32, is_pure=False, pack=1)  # fmt: skip


@triton.jit
def sum_of_published(ws_ptr, tile, tag, ROWS: tl.constexpr, PARTS: tl.constexpr, PHASE: tl.constexpr):
    """Return the (ROWS,) sums over the PARTS of a tile's rows, added in the same order in every program and every run.

    Row r of part p is word (tile * PARTS + p) * ROWS + r. PHASE: 0 waits for them, else an earlier launch published them.
    """
    parts = tl.arange(0, triton.next_power_of_2(PARTS))
    index = (tile * PARTS + tl.where(parts < PARTS, parts, 0))[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    partials = await_published(ws_ptr, index, tag) if PHASE == 0 else load_published(ws_ptr, index)
    return tl.sum(tl.where((parts < PARTS)[:, None], partials, 0.0), axis=0)


@triton.jit
def publish_max(ws_ptr, index, value, tag, mask):
    """Set word `index` to the larger of its fp32 value and `value` ≥ 0, atomically; NaN counts as the largest."""
    word = (tag.to(tl.uint64) << 32) | value.to(tl.uint32, bitcast=True).to(tl.uint64)
    tl.atomic_max((ws_ptr + 32 + index).to(tl.pointer_type(tl.uint64)), word, mask=mask, sem="relaxed")


@triton.jit
def word_ptrs(ws_ptr, index):
    """Return pointers to words for `load_words` and `publish_if_larger`: neighbouring threads take neighbouring words.

    Triton cannot tell that the words are neighbours, so it gives no thread several words; L2 combines the maxima of a sector.
    """
    return (ws_ptr + 32 + held(index)).to(tl.pointer_type(tl.uint64))


@triton.jit
def load_words(word_ptr, mask):
    """Load the present contents of words, tag and value together."""
    return tl.load(word_ptr, mask=mask, other=0, cache_modifier=".cg")


@triton.jit
def publish_if_larger(word_ptr, value, tag, before, mask):
    """Call `publish_max` only for words that were smaller in `before`, a result of `load_words`: most words are large enough."""
    word = (tag.to(tl.uint64) << 32) | value.to(tl.uint32, bitcast=True).to(tl.uint64)
    tl.atomic_max(word_ptr, word, mask=mask & (word > before), sem="relaxed")


@triton.jit
def publish_max_and_load(ws_ptr, index, value, tag, mask):
    """Call `publish_max` for a word and return its value after that: the largest of this launch until now."""
    word = (tag.to(tl.uint64) << 32) | value.to(tl.uint32, bitcast=True).to(tl.uint64)
    found = tl.atomic_max((ws_ptr + 32 + index).to(tl.pointer_type(tl.uint64)), word, mask=mask, sem="relaxed")
    return (tl.maximum(found, word) & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def arrive(ws_ptr, index, tag, live):
    """Count this program in at word `index`, if `live`, after all maxima and values that its threads published before.

    The atomic max first makes the word at least this launch's zero, so that nobody has to clear it.
    """
    counter_ptr = (ws_ptr + 32 + index).to(tl.pointer_type(tl.uint64))
    if is_cuda():  # a barrier that Triton does not see, because Triton pipelines no loop that has a barrier
        tl.inline_asm_elementwise("bar.sync 0; mov.b32 $0, 0;", "=r,r", [index], dtype=tl.int32, is_pure=False, pack=1)
    else:
        tl.debug_barrier()
    tl.atomic_max(counter_ptr, tag.to(tl.uint64) << 32, mask=live, sem="relaxed")
    tl.atomic_add(counter_ptr, tl.full((), 1, tl.uint64), mask=live, sem="release")


@triton.jit
def await_arrivals(ws_ptr, index, count, tag):
    """Wait until `count` programs of this launch have arrived at word `index`; then their words can be read.

    All of them must be resident: launch cooperatively. Later loads of the thread go to L2, as the load of the counter does, and
    are not issued before it has seen the last arrival.
    """
    word = (tag.to(tl.uint64) << 32) | tl.full((), 0, tl.uint64) + count
    tl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .b64 w;
        AGAIN_${:uid}:
        ld.relaxed.gpu.global.b64 w, [$1];
        setp.ne.b64 p, w, $2;
        @p bra AGAIN_${:uid};
        mov.b32 $0, 0;
        }""",
        "=&r,l,l", [(ws_ptr + 32 + index).to(tl.int64), word], dtype=tl.int32, is_pure=False, pack=1)  # fmt: skip


@triton.jit
def count_in(counter_ptr):
    """Add 1 to a 32-bit counter after all earlier stores of this program, for `await_count` in programs of larger ids."""
    if is_cuda():
        tl.inline_asm_elementwise(
            """{
            .reg .pred first;
            .reg .b32 tid;
            bar.sync 0;
            mov.u32 tid, %tid.x;
            setp.eq.u32 first, tid, 0;
            @first red.release.gpu.global.add.u32 [$1], 1;
            mov.b32 $0, 0;
            }""",
            "=r,l", [counter_ptr.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)  # fmt: skip
    else:
        tl.debug_barrier()
        tl.atomic_add(counter_ptr, 1, sem="release", scope="gpu")


@triton.jit
def await_count(counter_ptr, count):
    """Wait until `count` programs have counted themselves in; later loads must go to L2 (`.cg`), as the load of the counter does.

    The programs must have begun before: NVIDIA's GPUs begin programs in the order of their ids, although CUDA does not promise
    it. Nor does PTX promise that loads behind the barrier see the stores before the count, because there is no
    fence: L2, to which both go, orders them. Elsewhere the programs must have come to their end in an earlier launch.
    """
    if is_cuda():
        tl.inline_asm_elementwise(
            """{
            .reg .pred p, first;
            .reg .b32 tid, seen;
            mov.u32 tid, %tid.x;
            setp.eq.u32 first, tid, 0;
            @!first bra READY_${:uid};
            AGAIN_${:uid}:
            ld.relaxed.gpu.global.u32 seen, [$1];
            setp.lt.u32 p, seen, $2;
            @p bra AGAIN_${:uid};
            READY_${:uid}:
            bar.sync 0;
            mov.b32 $0, 0;
            }""",
            "=r,l,r", [counter_ptr.to(tl.int64), count], dtype=tl.int32, is_pure=False, pack=1)  # fmt: skip


_COUNT_OUT = tl.constexpr(
    """{
            .reg .pred p;
            .reg .b32 tid, seen;
            mov.u32 tid, %tid.x;
            setp.eq.u32 p, tid, 0;
            @p atom.relaxed.gpu.global.add.u32 seen, [$1], 1;
            setp.eq.and.u32 p, seen, $2, p;
            @p st.relaxed.gpu.global.u32 [$1], 0;
            """
)
"""PTX of one thread that counts its program out at $1, and as number $2 sets the counter to 0; p holds in that thread alone."""


@triton.jit
def count_out(counter_ptr, count):
    """Add 1 to the counter after `await_count`; the program that makes `count`, all ins and outs, sets the counter to 0."""
    if is_cuda():
        tl.inline_asm_elementwise(
            _COUNT_OUT + """mov.b32 $0, 0;
            }""",
            "=r,l,r", [counter_ptr.to(tl.int64), count - 1], dtype=tl.int32, is_pure=False, pack=1)  # fmt: skip
    elif tl.atomic_add(counter_ptr, 1, sem="relaxed", scope="gpu") == count - 1:
        tl.store(counter_ptr, 0)


@triton.jit
def count_out_and_close(counter_ptr, count, ws_ptr, groups):
    """Call `count_out`; when the last of `groups` counters is set to 0, give the next launch on the workspace another tag."""
    if is_cuda():
        tl.inline_asm_elementwise(
            _COUNT_OUT + """@p atom.relaxed.gpu.global.add.u32 seen, [$3 + 128], 1;
            setp.eq.and.u32 p, seen, $4, p;
            @p st.relaxed.gpu.global.u32 [$3 + 128], 0;
            @p red.relaxed.gpu.global.add.u32 [$3], 1;
            mov.b32 $0, 0;
            }""",
            "=r,l,r,l,r", [counter_ptr.to(tl.int64), wide(count - 1).to(tl.int32), ws_ptr.to(tl.int64), groups - 1],
            dtype=tl.int32, is_pure=False, pack=1)  # fmt: skip
    elif tl.atomic_add(counter_ptr, 1, sem="relaxed", scope="gpu") == count - 1:
        tl.store(counter_ptr, 0)
        launch_ptr = ws_ptr.to(tl.pointer_type(tl.int32))
        if tl.atomic_add(launch_ptr + 32, 1, sem="relaxed", scope="gpu") == groups - 1:
            tl.store(launch_ptr + 32, 0)
            tl.atomic_add(launch_ptr, 1, sem="relaxed", scope="gpu")

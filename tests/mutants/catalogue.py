"""The wrong changes: what is changed to what, and the tests that are asked first.

An old text occurs exactly once in its file (tests/mutants/test_mutants.py). A change to the engine
that moves one mends it here in the same commit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from os.path import normpath


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One wrong change."""

    id: str
    file: str
    """Path from the repository's root."""
    old: str
    """Text that occurs once in the file."""
    new: str
    tests: tuple[str, ...]
    """What pytest runs first, as it takes them: those that are likely to notice."""
    equivalent: str = ""
    """Why no test can notice, where none can."""


Row = tuple[str, str, str] | tuple[str, str, str, str]
"""id, old text, new text, and the test asked first where it is not the file's own."""


def _changes(file: str, tests: str, *rows: Row) -> Iterator[Mutant]:
    """file: under engine. tests: file names and node ids under tests/engine, separated by
    blanks."""
    for name, old, new, *asked in rows:
        given = (asked[0] if asked else tests).split()
        paths = tuple(normpath(f"tests/engine/{test}") for test in given)
        reason = EQUIVALENT.get(name, "")
        change = {"id": name, "file": normpath(f"engine/{file}"), "old": old, "new": new}
        yield Mutant(**change, tests=paths, equivalent=reason)


EQUIVALENT = {
    "S2": "the backward follows the fetch and precedes the next forward either way",
    "X24": "it frees memory; nothing reads the recordings after the embedding's backward",
}
"""Of the schedule's, the derived waits are the same: tests/mutants/test_mutants.py derives them."""

NODE = "test_engine.py::"
GLOO = "../baselines/test_ranks.py"
SEARCHES = "test_report.py::test_a_table_says_how_the_options_of_rivals_were_found"
TWO_SEARCHES = (
    "test_tuner.py::test_searches_from_two_starts_or_for_two_models_share_a_folder_and_no_trial"
)
OF_FLOAT8 = "test_answers.py::test_float8_is_held_against_its_own_system_and_no_exact_master"
ENDS = "test_answers.py::test_both_ends_are_of_the_same_gpu_where_several_runs_have_one"
TIER = "test_tier.py"
TRAIN = "../sweeps/test_train.py"
LEFTOVERS = f"{TRAIN}::test_what_a_killed_run_left_half_written_goes"
LOGGED = f"{TRAIN}::test_the_log_says_what_was_done"
STARVED = f"{NODE}test_starved_lanes_give_identical_bits"
ADVERSARIAL = f"{NODE}test_adversarial_interleaving_of_lanes_gives_identical_bits"
RANKED = "test_ranks.py"
RANKED_STATE = "test_ranks_state.py"
NONE_READS = f"{RANKED_STATE}::test_a_state_that_one_rank_cannot_read_is_refused_by_all"
ONE_ALONE = f"{RANKED}::test_a_parameter_that_one_rank_alone_uses_is_updated_on_all"
BETWEEN = "test_schedule.py"
EVALUATES = f"{BETWEEN}::test_an_evaluation_of_ranks_ends_with_the_loss_of_all"
TOLD = "test_declared_access.py"
PADDING = "test_architectures.py::test_padding_reaches_the_layers_as_the_models_own_mask"
UNLIKE = "test_architectures.py::test_unlike_layers_train_as_the_plain_model"
DECAY = "../baselines/test_decay.py::test_placement_changes_no_bit_where_matrices_alone_decay"
ROUNDED_ONCE = f"{NODE}test_micro_batches_are_summed_in_fp32_and_rounded_once"
SUMMED = f"{NODE}test_a_sum_in_fp32_is_there_where_several_gradients_come_and_no_longer"
TWICE = f"{NODE}test_weights_of_kept_layers_pass_through_the_slots_twice_where_asked"
COMES_BACK = (
    "test_attention.py::test_it_comes_back_for_each_time_that_the_layer_runs_again "
    "test_attention.py::test_what_waits_on_the_host_gives_identical_bits "
    "test_attention.py::test_at_most_two_layers_have_it_on_the_device_at_a_time "
    "test_attention.py::test_as_many_as_there_is_room_for "
    "test_attention.py::test_the_inputs_kept_are_as_many_as_make_the_shortest_step "
    "test_schedule.py::test_removing_any_one_wait_is_found"
)
ITS_BYTES = "test_attention.py::test_the_plan_has_its_bytes_once"
KEPT_ATTENTION = "test_attention.py"
PLACEMENT = f"{NODE}test_any_placement_gives_identical_bits"
DEPTHS = f"{NODE}test_any_depth_streams_interval_and_slabs_give_identical_bits"
DECLARED = f"{STARVED} {ADVERSARIAL} {PLACEMENT} test_schedule.py"
TOUCHED = "test_declared_access.py::test_operations_touch_only_what_they_declare"
MISSING = (
    "test_declared_access.py::test_every_declaration_that_is_missing_is_found_where_it_is_missing"
)
EVALUATION = "test_evaluation.py::"
EVALUATED = f"{EVALUATION}test_an_evaluation_between_steps_changes_no_bit"
NORMS = "test_each_steps_gradient_norm_stays_and_is_that_before_clipping"
FROZEN = "test_frozen.py::test_training_is_torchs_own"
SOMETIMES = "test_frozen.py::test_a_parameter_that_gets_a_gradient_in_some_steps_only_is_one_line"
STRETCHES = "test_frozen.py::test_stretches_join_neighbours_and_leave_out_the_rest"
CONNECTED = "test_architectures.py::test_layers_connected_by_more_than_hidden_states_are_refused"
TUPLES = "test_rehearsal.py::test_a_layer_may_return_a_tuple_that_its_output_comes_first_in"
ASSIGNED = "test_architectures.py::test_a_parameter_used_before_the_layers_may_be_registered_after"
WHOLE = "test_state.py"
BESIDE = "test_state_beside.py"
FIRST_STEP = "test_architectures.py::test_first_step_equals_the_plain_model"
NORM = f"{NODE}test_the_norm_is_that_of_all_gradients"
DRAINED = f"{NODE}test_parameters_and_checkpoints_are_those_after_every_step_given"
SCHEDULE = "test_schedule.py::"
RINGS = f"{SCHEDULE}test_rings_are_used_in_turn"
SERIAL = f"{SCHEDULE}test_a_serial_optimizer_runs_between_one_step_and_the_next"
LATE = f"{SCHEDULE}test_moments_are_updated_last_block_first_before_their_slabs_are_written_again"
EVICTED = (
    "test_schedule.py::test_evicted_activations_give_up_their_memory_once_their_copies_had_the_time"
)
SPREAD = f"{SCHEDULE}test_offloaded_layers_are_spread_evenly_and_never_recomputed"
AHEAD = f"{SCHEDULE}test_weights_are_loaded_once_for_each_computation_and_so_many_ahead"
IN_ORDER = f"{SCHEDULE}test_updates_that_wait_come_in_the_order_of_the_next_forward"
ROOM = f"{SCHEDULE}test_activations_come_back_only_into_what_others_gave_up"
ONE_PASS = f"{SCHEDULE}test_one_pass_updates_all_where_gradients_cannot_wait"
CUDA = "test_engine_errors.py::test_cuda_lanes_wait_for_the_tickets_they_are_given"
DRAIN = "test_engine_errors.py::test_a_drain_returns_once_the_worker_has_done_what_was_queued"

MUTANTS = (
    *_changes(
        "recipe.py",
        "test_optimizer.py::test_learning_rates_are_these",
        ("R1", "self.lr * (step + 1) / self.warmup_steps", "self.lr * step / self.warmup_steps"),
        ("R2", "/ (self.total_steps - self.warmup_steps)", "/ self.total_steps"),
        ("R3", "progress = min(1.0, ", "progress = min(9.0, "),
        ("R4", "math.cos(math.pi * progress)", "math.cos(math.pi / 2 * progress)"),
        (
            "R5",
            "int((self.labels != IGNORE_INDEX).sum())",
            "self.labels.numel()",
            f"{NODE}test_accumulation_divides_by_all_label_tokens_of_the_step",
        ),
    ),
    *_changes(
        "adamw.py",
        "test_optimizer.py",
        ("O1", "r.beta1 ** (step + 1)", "r.beta1 ** (step + 2)"),
        ("O2", "r.beta2 ** (step + 1)", "r.beta2 ** (step + 2)"),
        ("O3", "decay=1 - lr * r.weight_decay", "decay=1 - r.weight_decay"),
        ("O4", "self.recipe.lr_at(step)", "self.recipe.lr"),
        ("O5", "(root * root_bias2 + eps)", "((root + eps) * root_bias2)"),
        ("O6", "max=1.0)", "max=10.0)"),
        ("O7", "clamp(clip_norm / (norm + 1e-6)", "clamp(clip_norm / norm"),
        ("O8", "max=1.0) + 0.0 * norm", "max=1.0)"),
        (
            "O11",
            "torch.isfinite(scale), read",
            "torch.isfinite(scale) | True, read",
            "test_engine_errors.py",
        ),
        ("O12", "return p * decay - step", "return p - step"),
        ("O13", "gradient[chunk].float() * hyper.scale", "gradient[chunk].float()"),
        ("O14", "chunk = slice(start, start + FALLBACK_CHUNK)", "chunk = slice(0, FALLBACK_CHUNK)"),
        ("O15", "dim=-1, dtype=torch.float32)", "dim=-1)", NORM),
        ("O16", "torch.cat(rows), dtype=torch.float64)", "torch.cat(rows))", "test_norm.py"),
    ),
    *_changes(
        "master.py",
        "test_optimizer.py",
        ("O9", "high = (bits + 0x8000) >> 16", "high = bits >> 16"),
        ("O10", "<< 16) + extra.int()", "<< 16) - extra.int()"),
    ),
    *_changes(
        "csrc/adamw.cpp",
        "test_optimizer.py",
        ("K1", "(g - m) * h.beta1_rest", "(g - m) * h.beta2_rest"),
        ("K2", "(g * g) * h.beta2_rest", "g * h.beta2_rest"),
        ("K3", "p = p * h.decay;", ""),
        ("K4", "std::sqrt(v1) * h.root_bias2 + h.eps", "std::sqrt(v1 + h.eps) * h.root_bias2"),
        ("K5", "r[i] = static_cast<int16_t>(bits - (high << 16));", "r[i] = 0;"),
        ("K6", "uint32_t high = (bits + 0x8000u) >> 16;", "uint32_t high = bits >> 16;"),
        ("K7", "(to_bits(p[i]) + 0x8000u) >> 16", "to_bits(p[i]) >> 16"),
        ("K8", "bits + 0x7fffu + ((bits >> 16) & 1u)", "bits + 0x8000u"),
        ("K9", "scaled = gradient(g, i) * h.scale;", "scaled = gradient(g, i);"),
        ("K10", "else work(begin, end);", ""),
        ("K11", "begin += run) work(begin", "begin += 2 * run) work(begin"),
        ("K12", "if constexpr (MOMENTS) m = m1", "m = m1"),
    ),
    *_changes(
        "layers/head.py",
        f"{FIRST_STEP} {NODE}test_the_chunk_does_not_change_the_loss",
        (
            "H1",
            " / num_tokens\n        grads",
            " / labels.numel()\n        grads",
            f"{NODE}test_accumulation_divides_by_all_label_tokens_of_the_step",
        ),
        ("H7", "labels[part]) / num_tokens\n    return", "labels[part])\n    return", EVALUATED),
        ("H8", "total += summed(", "total = summed(", EVALUATED),
        ("H2", "total += loss.detach()", "total = loss.detach()"),
        (
            "H3",
            "logits.float().flatten",
            "logits.flatten",
            "test_engine_parity.py::test_bf16_with_fp32_master_50_steps",
        ),
        ("H4", "ignore_index=IGNORE_INDEX", "ignore_index=0"),
        ("H5", "grad_hidden[part] = grads[0]", "grad_hidden[part] = grads[0] * 2"),
    ),
    *_changes(
        "sizes.py",
        "test_engine_state.py",
        ("B40", "self.num_loss_chunks if self.tied else 0", "0", SUMMED),
        (
            "H6",
            "range(0, seq_len, num_columns)",
            "range(0, seq_len - num_columns + 1, num_columns)",
            f"{FIRST_STEP} {NODE}test_the_chunk_does_not_change_the_loss",
        ),
        ("B4", 'torch.int16 if self.master == "split" else torch.float32', "torch.int16"),
        (
            "B5",
            "[0] * self.on_device + [self.part(block) for block in hosted]",
            "[0] * (self.on_device + 1) + [self.part(block) for block in hosted[1:]]",
        ),
        ("G6", "return pieces * self.num_micro_batches", "return pieces", ROUNDED_ONCE),
        (
            "P1",
            "max(layout.numel for layout in self.layouts[1:-1])",
            "self.layouts[1].numel",
            UNLIKE,
        ),
    ),
    *_changes(
        "layers/decoder.py",
        "test_architectures.py",
        ("D1m", "isinstance(value, torch.Tensor) and value.requires_grad:", "False:", CONNECTED),
        ("D2m", "if len(shared) != sum(", "if False and len(shared) != sum("),
        ("D3m", '("p", "attention_dropout", "dropout")', '("attention_dropout",)'),
        ("D4m", "for layer in module} <= names", "for layer in module} & names"),
        ("D5", "attention_mask=attention_mask", "attention_mask=None", PADDING),
        ("D6", "outer[name].detach(), parameter", "outer[name].detach().clone(), parameter"),
        ("D7", "if id(parameter) not in parameters:", "if True:"),
        ("D8", "self._inject if index == self.num_layers - 1 else hidden", "hidden"),
        (
            "D9",
            "        head = self.blocks[-1]",
            "        used_before, head = set(), self.blocks[-1]",
            ASSIGNED,
        ),
        ("D10", "detach(), parameter.requires_grad)", "detach())", FROZEN),
        ("D11", "if index and hidden is not self._passed:", "if False:", "test_rehearsal.py"),
        ("D12", "if width == hidden.shape[-1]", "if True"),
        (
            "D13",
            "found = refuse_random(self.model, device, run)",
            "found = run()",
            "test_randomness.py",
        ),
    ),
    *_changes(
        "layers/template.py",
        "test_architectures.py",
        ("T1", "setattr(module, INDEX, index)", "pass"),
        ("T2", "type(module), attributes, buffers", "type(module), buffers"),
        ("T3", "attributes, buffers, shapes)", "attributes, shapes)"),
        ("T4", "self.mlp.unread = False", "self.mlp.unread = True"),
        ("T5", "if self.mlp.only_added:", "if True:", "test_attention.py"),
        ("T6", "return grad_hidden, grads", "return grad_hidden, grads[::-1]"),
        (
            "T8",
            "return outputs[0] if self.num_outputs",
            "return outputs if self.num_outputs",
            TUPLES,
        ),
        (
            "T9",
            "            output = refuse_random(",
            "            output = (lambda m, d, run, again: run())(",
            "test_randomness.py",
        ),
        ("T10", "= is_only_added(outputs)", "= True", "test_chunked.py"),
    ),
    *_changes(
        "layers/chunked.py",
        "test_chunked.py",
        ("Q1", "range(0, row.shape[1], self", "range(0, row.shape[1] - self._chunk + 1, self"),
        ("Q2", "grad.to(torch.float32, copy=True)", "grad.clone()"),
        ("Q3", "total.add_(grad)", "total.copy_(grad)"),
        ("Q4", 'root is not None and root.name() == "AddBackward0"', "True"),
        ("Q5", "if node is not root and any(", "if any("),
        ("Q6", "max(dims) == 1", "max(dims) == 2"),
        ("Q7", "isinstance(_part(n), ChunkedMLP)", "isinstance(_part(n), Chunked)"),
    ),
    *_changes(
        "layers/offload.py",
        "test_offload.py",
        ("F1", "key = (flat.data_ptr(), flat.nbytes)", "key = (flat.data_ptr(), 0)"),
        ("F2", "assert self._versions in ", "assert True or self._versions in "),
        ("F3", "offset = int(tensor.storage_offset())", "offset = 0", PLACEMENT),
        (
            "F4",
            "stride=tensor.stride(),\n            offset=offset",
            "stride=torch.empty(tensor.shape).stride(),\n            offset=offset",
        ),
        ("F5", "piece[start - place.start : end - place.start]", "piece[: end - start]"),
        ("F16", "(part + 1) * length", "part * length + length // 2"),
        ("F6", "if self.num_bytes + flat.nbytes > self.capacity:", "if False:"),
        ("F7", "int(tensor.storage_offset() - flat.storage_offset())", "0"),
        ("F8", "if stride != expected:", "if False:"),
        ("F9", "flat.nbytes) not in self._seen and _is_dense", "0) not in () and _is_dense"),
    ),
    *_changes(
        "store.py",
        "test_engine_state.py",
        ("B1", "read_master(state.weight, state.extra)", "read_master(state.weight, None)"),
        ("B2", "if value.dtype == state.weight.dtype and (", "if ("),
        ("B3", '.to("cpu", copy=True).view(f.shape)', '.to("cpu").view(f.shape)', DRAINED),
        ("Z1", "self.ranks.gather(whole)", "pass", RANKED_STATE),
        ("Z2", "self.ranks.gather(home)", "pass", RANKED_STATE),
        ("Z3", "[within(self.part(block), field.stretch)]", "[: state.weight.numel()]", RANKED),
    ),
    *_changes(
        "saving.py",
        "test_engine_state.py test_engine.py",
        ("C4", "os.rename(whole, directory)", "shutil.copytree(whole, directory)"),
    ),
    *_changes(
        "layers/packing.py",
        "test_packed.py",
        ("J1", "position_ids[:, :1] - 1, dim=-1) != 1", "position_ids[:, :1] - 1, dim=-1) > 1"),
        ("J2", "(_seen(mask) & across).any()", "False"),
        ("J3", "isinstance(module, nn.Conv1d)", "False"),
    ),
    *_changes(
        "state.py",
        WHOLE,
        ("C1", '"extra", "exp_avg", "exp_avg_sq")', '"extra", "exp_avg")'),
        ("C3", "[[f.name, list(f.shape)] for", "[[f.name] for", "test_engine_state.py"),
        ("C5", '"step": step, "recipe"', '"step": step + 1, "recipe"'),
        ("Z43", "self._store.on_disk.copy(block, self._copies[block][ON_DISK])", "pass", TIER),
        ("Z5", "files |= json.loads(said.read_text())", "pass", RANKED_STATE),
        (
            "Z6",
            "OSError(said[0]) if said and (gone or error is None) else error",
            "error",
            RANKED_STATE,
        ),
        ("Z49", "if said and (gone or error is None)", "if said and error is None", RANKED_STATE),
        ("C13", 't.to("cpu", copy=True)', 't.to("cpu")', BESIDE),
        ("C14", "+ num_bytes > room:", "> room:"),
        ("C17", "any more\n            raise", "any more\n            return writes"),
        ("C19", "        self._taking = taking\n", "", BESIDE),
        ("C20", "range(self._store.spec.on_device):", "range(0):", BESIDE),
        ("C21", "if taking is not None and taking.lacks(block):", "if False:", BESIDE),
        ("C22", "            if block not in self._left:\n", "            if False:\n", BESIDE),
        ("C23", "                self._error = error\n", "", BESIDE),
        ("C24", "            self._left.pop(block, None)\n", "", BESIDE),
        ("C25", "            raise self._error\n", "            pass\n", BESIDE),
        ("C26", "                self._forget()\n", "                pass\n", BESIDE),
        ("C27", "first = self._store.spec.on_device", "first = 0", BESIDE),
        ("C18", "last, self._last = self._last, None", "last = self._last"),
    ),
    *_changes(
        "blockfile.py",
        "test_state.py test_blockfile.py",
        ("C11", "        os.fsync(file)\n", ""),
        ("C41", "            sha256.update(piece)\n            _put", "            _put"),
        ("C42", "+ start * tensor.itemsize", "+ start"),
        (
            "C43",
            "            _copy(source[:count], pages[filled:])",
            "            _copy(source[:count], pages)",
        ),
        ("C44", "if not filled and in_place and", "if in_place and"),
        ("C45", "and not _address(source) % mmap.PAGESIZE", "and False"),
    ),
    *_changes(
        "resuming.py",
        WHOLE,
        ("C2", "if not path.is_file():", "if False:", "test_engine_state.py"),
        ("Z44", "store.fetch(block, changes=True)", "store.fetch(block)", TIER),
        ("Z4", "num_parts), within(own, theirs), mine", "num_parts), mine, mine", RANKED_STATE),
        ("Z7", "refused = refused or (ValueError(said[0]) if said else None)", "pass", NONE_READS),
        ("C6", 'del wanted["master"]', "pass", "test_engine_state.py"),
        ("C7", 'if blockfile.sha256_of(path) != expected.get("sha256"):', "if False:"),
        ("C9", "        _check_tensors(path", "        () or (path"),
        (
            "C10",
            "(directory / COMMIT).read_text() == ",
            "(directory / COMMIT).read_text() or ",
        ),
        ("C12", 'allowed | {"block": path.stem}', 'allowed | {"block": got["block"]}'),
        ("C16", "write_master(master, state.weight, state.extra)", "pass"),
    ),
    *_changes(
        "trainer.py",
        "test_engine_state.py",
        ("N8", "self.drain()\n        try:", "try:", EVALUATED),
        ("N9", "finally:\n            self.drain()", "finally:\n            pass", EVALUATED),
        ("N1", "self._next_step += 1", "self._next_step += 2", UNLIKE),
        (
            "N7",
            "set_multithreading_enabled(False)",
            "set_multithreading_enabled(True)",
            f"{NODE}test_every_backward_runs_on_the_thread_that_submits_it",
        ),
    ),
    *_changes(
        "megatrain.py",
        "test_engine_state.py",
        ("N2", "self._next_step = resume(", "resume("),
        (
            "N3",
            "self._settle()\n        self.saver.save(",
            "self.executor.finish_moments()\n        self.saver.save(",
            DRAINED,
        ),
        ("N4", "self.drain()\n        for block in range(", "for block in range(", DRAINED),
        (
            "N5",
            "self._settle()\n        self.saver.save(",
            "self.drain()\n        self.saver.save(",
        ),
        (
            "N6",
            "._settle()\n        for block in range(self.blocks.num_blocks):\n            self.s",
            ".drain()\n        for block in range(self.blocks.num_blocks):\n            self.s",
        ),
        ("N10", "self.saver.before(block)", "pass", BESIDE),
    ),
    *_changes(
        "device.py",
        UNLIKE,
        ("G1", "self._slab[start:end].zero_()", "pass"),
        ("Z23", "self._ranks.exchange(slab, received)", "received.copy_(slab)", RANKED),
        ("Z24", "self._ranks.gather(self.home(op)[: self.layout(op).numel])", "pass", RANKED),
        ("G2", "torch._foreach_add_, grads", "torch._foreach_copy_, grads"),
        (
            "G3",
            "self._sums[index].zero_()",
            "pass",
            f"{NODE}test_a_parameter_unused_in_every_other_layer_has_no_gradient_there",
        ),
        ("G4", "self._work.summed_bytes(block) // 4", "0", ROUNDED_ONCE),
        ("G5", "key = (op.slot, self.layout(op))", "key = (op.slot, None)"),
        ("G7", "else self._slabs[op.slab]", "else self._slabs[0]", DECLARED),
        ("G9", "max(streamed, default=0)", "next(iter(streamed), 0)"),
        ("G10", "max(passing, default=0)", "next(iter(passing), 0)"),
        ("G8", "else self.slots[op.slot]", "else self.slots[0]", DECLARED),
    ),
    *_changes(
        "layers/float8.py",
        "test_float8.py",
        (
            "FL1",
            "_turned(_scaled(hidden, E4M3))",
            "_turned(_scaled(hidden, E5M2))",
        ),
        (
            "FL2",
            "_scaled(grads[0], E5M2)",
            "_scaled(grads[0], E4M3)",
        ),
        ("FL3", ".to(dtype), scale.reciprocal()", ".to(dtype), scale"),
        ("FL4", ".clamp(min=LEAST)", ""),
        ("FL5", "return output if self.bias is None else output + self.bias", "return output"),
        (
            "FL6",
            "_times(grad, _turned(_scaled(weight, E4M3)))",
            "_times(grad, _turned(_scaled(2 * weight, E4M3)))",
        ),
        ("FL7", "in (num_tokens, chunk)", "in (num_tokens,)"),
        ("FL9", "tensor.contiguous()", "tensor"),
        ("FL10", "ROUTERS & set(path.split", "set() & set(path.split"),
        ("FL8", "not any(side % MULTIPLE for", "all(side % MULTIPLE == 0 or side > 16 for"),
    ),
    *_changes(
        "layers/attention.py",
        KEPT_ATTENTION,
        ("AT1", "self._next += 1", "pass"),
        (
            "AT2",
            "if func in KERNELS:\n            self._results",
            "if False:\n            self._results",
        ),
        ("AT3", "if func not in KERNELS:", "if True:"),
        ("AT6", "else self.moved.pack", "else torch.Tensor.detach", COMES_BACK),
        ("AT4", "setattr(F, NAME, _PLAIN)", "pass"),
        ("AT5", "_MODE.reset(token)", "pass"),
    ),
    *_changes(
        "step.py",
        COMES_BACK,
        ("AT7", "            yield from self.attention_given(visit)\n", ""),
        ("AT8", "coming.kind in AGAIN and", "coming.kind is Kind.BACKWARD and"),
        (
            "AT9",
            "(writes if kind is Kind.FORWARD else reads).append",
            "reads.append",
            "test_attention.py",
        ),
    ),
    *_changes(
        "blocks.py",
        COMES_BACK,
        ("AT10", "len(self.attention_kept) - self.keep_attention", "self.offload_attention"),
        ("Z62", "if self.disk_blocks > self.head - self.device_optimizer:", "if False:", TIER),
    ),
    *_changes(
        "planner/placement.py",
        "test_placement.py",
        ("Z60", "best(itertools.product(devices, offloads[:1]))", "None"),
        ("Z61", "return layers[fewest]", "return 1 + layers[fewest]"),
        ("Z70", "disk_blocks=min(number, most - here)", "disk_blocks=number"),
        ("Z71", "return next(filter(has_room, outer), most)", "return most"),
    ),
    *_changes(
        "planner/cost.py",
        "test_placement.py",
        ("Z80", "num_bytes / (alone * EVICT_SHARE)", "num_bytes / alone"),
        ("Z183", "/ alone) / BESIDE_LOADS", "/ alone)"),
        ("Z184", "(self.blocks.deferred and self._updates_beside)", "self.blocks.deferred"),
        ("Z185", "(self.blocks.deferred and self._updates_beside)", "self._updates_beside"),
        ("Z81", "return self._evict(self.work.moved_bytes)", "return self.work.moved_bytes"),
        ("Z82", "op.part[1] / rates.h2d_bytes", "1 / rates.h2d_bytes"),
    ),
    *_changes(
        "planner/rates.py",
        "test_probes.py",
        ("Z86", "sum(1 / rate for rate in found[count])", "1 / found[count][0]"),
        ("Z87", "return found[optimizer.num_threads]", "return found[threads[0]]"),
    ),
    *_changes(
        "planner/planner.py",
        "test_probes.py",
        ("Z88", "self.config.torch_adamw or self.ranks.count > 1", "self.config.torch_adamw"),
        ("Z89", 'self.device.type != "cuda" or len(self._threads) == 1', "len(self._threads) == 1"),
    ),
    *_changes(
        "megatrain.py",
        "test_probes.py",
        ("Z90", "config=self._planner.chosen", "config=config"),
    ),
    *_changes(
        "../analysis/rows.py",
        f"../analysis/{SEARCHES}",
        ("Z91", "if name in preset), ", "if preset.startswith(name)), "),
    ),
    *_changes(
        "../analysis/tables.py",
        f"../analysis/{SEARCHES}",
        ("Z95", ' and _settings(best) == _settings(line["config"])', ""),
    ),
    *_changes(
        "../sweeps/identity.py",
        f"../e2e/{TWO_SEARCHES}",
        ("Z96", "{choice}-{model}", "{choice}"),
    ),
    *_changes(
        "../analysis/answers.py",
        f"../analysis/{OF_FLOAT8} ../analysis/{ENDS}",
        ("Z92", '.isna() == exact) & lines["plain"]', ".isna() == exact)"),
        ("Z93", "ends[own | ~ends[x].isin(ends.loc[own, x])]", "ends"),
        ("Z94", '(known["family"] == family) & ', ""),
    ),
    *_changes(
        "../sweeps/agreement.py",
        "../sweeps/test_agreement.py",
        ("Z83", "LOSS_TOLERANCE if products_of(row.config) == PLAIN else ", ""),
        ("Z84", "products_of(row.config) == PLAIN", "True"),
    ),
    *_changes(
        "planner/planner.py",
        COMES_BACK,
        ("AT11", "max(0, kept - 2) if", "kept if"),
        ("AT14", "math.isqrt(asked.num_layers) + 1) + 1", "0) + 1"),
    ),
    *_changes(
        "sizes.py",
        COMES_BACK,
        ("AT12", "beside + min(2, len(moved) + here)", "0", ITS_BYTES),
        ("AT15", "return max(here, ", "return here + max(0, ", ITS_BYTES),
        ("AT16", "if all_stay else graph - given", "if all_stay else graph", ITS_BYTES),
        ("LB1", "max(layer, self.counted[backward])", "layer", "test_counted.py"),
        ("LB2", "if backward and not self.counted[True]:", "if False:", "test_counted.py"),
        (
            "AT13",
            "activations |= dict.fromkeys(blocks.attention_moved, attention)",
            "activations |= dict.fromkeys(blocks.attention_moved, slab)",
        ),
    ),
    *_changes(
        "tier.py",
        TIER,
        ("Z40", "if block != self._fetched:", "if self._fetched < 0:"),
        ("Z41", "self._changed |= changes", "pass"),
        ("Z42", "offset += buffer.numel()", "pass"),
    ),
    *_changes(
        "ranks.py",
        RANKED,
        ("Z25", "slice(self.index * each, (self.index + 1) * each)", "slice(0, each)"),
        ("Z26", "dist.all_to_all_single(received, flat)", "received.copy_(flat)", GLOO),
        ("Z27", "_all_gather(flat, flat[self.part(flat.numel())])", "pass", GLOO),
        ("Z28", "return found.view(self.count, -1)", "return found.view(self.count, -1) * 0", GLOO),
    ),
    *_changes(
        "planner/cost.py",
        f"{RANKED}::test_a_prediction_knows_the_ranks",
        ("Z29", "/ num_ranks / rates.h2d_bytes", "/ rates.h2d_bytes"),
        (
            "Z30",
            "others = (self.blocks.num_ranks - 1) / self",
            "others = self.blocks.num_ranks / self",
        ),
        ("Z31", "UPDATE_BYTES * layout.numel / num_ranks", "UPDATE_BYTES * layout.numel"),
    ),
    *_changes(
        "layout.py",
        UNLIKE,
        ("Y1", "strict=True) if start < end]", "strict=True) if start > end]"),
        ("Y2", "round_up(shape.numel(), PARAMETER_ALIGNMENT)", "round_up(shape.numel() - 64, 64)"),
        ("Y3", "if wanted and found and found", "if found and found", STRETCHES),
        ("Y4", "found.append(slice(f.offset, end))", "found.append(slice(0, end))", STRETCHES),
    ),
    *_changes(
        "layers/rehearsal.py",
        "test_rehearsal.py",
        (
            "E5",
            "template.mlp.only_added = tried.mlp.only_added",
            "pass",
            "test_attention.py::test_the_first_step_keeps_it_of_all_but_the_first_layer",
        ),
        ("E1", "template.num_outputs = tried.num_outputs", "pass"),
        ("E2", "if id(hidden) not in found or id(given) in found:", "if False:"),
        ("E3", "with _NothingAtRandom():", "with contextlib.nullcontext():"),
        ("E4", "decoder.assign(_used(twin, hidden))", "_used(twin, hidden)", ASSIGNED),
    ),
    *_changes(
        "kernel.py",
        "test_kernel.py",
        ("A1", "and hashlib.sha256(content[:-size]).digest() == content[-size:]", ""),
        ("A3", "mine = status.st_uid == os.geteuid() and not", "mine = not"),
        ("A4", 'library.parent / "building"', "library.parent / str(os.getpid())"),
        ("A6", '"TMPDIR": scratch', '"TMPDIR": tempfile.gettempdir()'),
    ),
    *_changes(
        "csrc/disk.cpp",
        "test_disk.py",
        ("I1", "share.stripe / count * pool.stripe", "share.stripe * pool.stripe"),
        ("I2", "at += moved / PAGE * PAGE;", "at = piece.size;"),
        ("I3", "if (!pool.failure.code) {\n      lock", "if (true) {\n      lock"),
        ("I4", "if (errno != EAGAIN || ++busy > BUSY_TRIES)", "if (++busy > BUSY_TRIES)"),
        ("I5", "if (status.st_size < drive.bytes) return TRUNCATED;", ""),
        ("I6", "return drive.direct ? 0 : forget(drive.fd, piece);", "return 0;"),
        ("I7", "drive.shares.push_back(share);", "drive.shares.push_front(share);"),
        ("I8", "pthread_sigmask(SIG_SETMASK, &all, &before);", "before = {};"),
        ("I9", "request, 0, pool->drives.size(), failure", "request, 0, 1, failure"),
        ("I10", "if (errno == EINTR) continue;", ""),
    ),
    *_changes(
        "disk.py",
        "test_disk.py",
        ("I11", "os.posix_fallocate(descriptor, 0, num_bytes)", "os.truncate(path, num_bytes)"),
        ("I12", "wanted[disk] += size", "wanted[disk] = size"),
        ("I13", "undo.callback(_removed, own)", "pass"),
        ("I14", "os.pwritev(descriptor, [page], 0)", "pass"),
    ),
    *_changes(
        "swap.py",
        "test_disk.py",
        ("I15", "fcntl.flock(descriptor, fcntl.LOCK_EX)  # some", "pass  # some"),
        ("I16", "if status.st_uid == os.geteuid() and", "if"),
        ("I17", "free[disk] // disks.count(disk)", "free[disk]"),
        ("I18", "free[os.stat(folder).st_dev] += sum(", "sum("),
    ),
    *_changes(
        "executor.py",
        f"{FIRST_STEP} {DEPTHS}",
        ("X1", "norms[op.block] = norm_of([flat", "norms[0] = norm_of([flat", NORM),
        (
            "X2",
            "self.store.slabs[op.host_slab][: target.numel()]",
            "self.store.slabs[0][: target.numel()]",
        ),
        (
            "X40",
            "capacity=0 if op.fate is Fate.KEPT else self.store",
            "capacity=self.store",
            PLACEMENT,
        ),
        (
            "X41",
            "moved.home = self.memory.home(op)\n",
            "pass\n",
            PLACEMENT,
        ),
        ("X42", "if not once or op.block not in", "if op.block not in", KEPT_ATTENTION),
        ("X3", "(op.block - 1) % self.blocks.check", "op.block % self.blocks.check"),
        ("X4", "if math.isfinite(scale):", "if True:", "test_engine_errors.py"),
        (
            "X5",
            "self._run_layer(op, s, s.hidden, graph=False)\n            return",
            "self._run_layer(op, s, s.hidden, graph=False)[::-1]\n            return",
        ),
        (
            "X32",
            "s.hidden, graph=False)\n\n    def _loss",
            "s.hidden[:1] * len(s.hidden), graph=False)\n\n    def _loss",
            EVALUATED,
        ),
        ("X33", "s.norm.copy_(norm_of(", "(norm_of(", f"{EVALUATION}{NORMS}"),
        (
            "X34",
            "state.norm if self.blocks.clip else None",
            "state.norm",
            f"{EVALUATION}test_without_clipping_there_is_no_gradient_norm",
        ),
        ("X7", "scale + 0.0 * s.loss", "scale + 0.0", "test_engine_errors.py"),
        ("X8", "hyper_tensor(s.index", "hyper_tensor(0", PLACEMENT),
        (
            "X9",
            "self._late.pop(block)\n",
            "self._late.pop(block)\n        scale = float(self.memory.verdict[2])\n",
            STARVED,
        ),
        ("X10", "of_all[:, 1:].flatten()", "of_all[:, 2:].flatten()", NORM),
        ("X11", "s.batch.labels[m]", "s.batch.labels[0]"),
        ("X12", "flat.view(-1, BLOCK_ALIGNMENT)", "flat[: flat.numel() // 2]", NORM),
        ("X13", "s.loss.add_(loss)", "s.loss.copy_(loss)"),
        ("X14", "moved.home = self.memory.home(op)", "pass", PLACEMENT),
        ("X15", "self._late[op.block] = (s.index, scale)", "self._late[op.block] = (s.index, 1.0)"),
        (
            "X16",
            "if before or not offset",
            "if not offset",
            f"{NODE}test_the_executor_submits_what_the_schedule_says",
        ),
        (
            "X19",
            "clip_scale(s.norm, self.optimizer.recipe.clip_norm)",
            "clip_scale(s.norm, 1.0)",
            UNLIKE,
        ),
        ("X20", "self.memory.tied_gradients.clear()", "pass", "test_engine_errors.py"),
        ("X27", "if first != reached:", "if False:", SOMETIMES),
        ("X28", "[r and d is decays for", "[d is decays for", FROZEN),
        ("X29", "g = gradient[part]", "g = gradient[: part.stop - part.start]", FROZEN),
        ("X35", "taken=taken, decays=decays", "taken=taken", DECAY),
        ("X37", "        )\n        self._before(op.block)\n", "        )\n", BESIDE),
        ("X36", "self._hyper[decays], scale", "self._hyper[True], scale", DECAY),
        ("X30", "slabs[block][part]", "slabs[block][: part.stop - part.start]", FROZEN),
        ("X31", "gradient[part], hyper", "gradient[: part.stop - part.start], hyper", FROZEN),
        (
            "Z9",
            "mine = batch.rows(self._ranks.part(batch.tokens.shape[1]))",
            "mine = batch",
            RANKED,
        ),
        ("Z10", "num_tokens=batch.num_tokens, loss", "num_tokens=mine.num_tokens, loss", RANKED),
        ("Z11", "of_all[:, 1:].flatten()", "of_all[0, 1:].flatten()", RANKED),
        ("Z12", "s.loss.copy_(of_all[:, 0].sum())", "pass", RANKED),
        ("Z13", ".amax(0).tolist()", ".amin(0).tolist()", ONE_ALONE),
        (
            "Z14",
            "within(stretch, part), decays",
            "within(stretch, slice(0, 1 << 40)), decays",
            RANKED,
        ),
        ("Z15", "s.loss.copy_(self._ranks.stacked(s.loss[None]).sum())", "pass", RANKED),
        ("Z16", "norm_of([part.view(-1, BLOCK_ALIGNMENT)])", "norm_of([part[:64][None]])", RANKED),
        ("X22", "s.saved[op.block + 1] = ", "s.saved[op.block] = "),
        ("X23", "masks[m]", "masks[0]", PADDING),
        ("X24", "s.recordings.clear()", "pass"),
        ("X25", "self.memory.scale.copy_(scale)", "pass", PLACEMENT),
        ("X26", "self._tickets = ([], [])", "pass", "test_engine_errors.py"),
    ),
    *_changes(
        "blocks.py",
        f"test_schedule.py {PLACEMENT}",
        ("P2", "if layer > self.num_streamed:", "if layer >= self.num_streamed:", SPREAD),
        ("P3", "self.optimizer_overlap and not self.pooled", "self.optimizer_overlap", ONE_PASS),
        ("P4", "return self.clip or not self.optimizer_overlap", "return self.clip", SERIAL),
        (
            "P5",
            "if moved < self.offload_activations",
            "if moved <= self.offload_activations",
            SPREAD,
        ),
        ("P6", "found[layer] = min(due, self.head)", "found[layer] = self.head", EVICTED),
        ("P7", "is Fate.KEPT and not self.reload_weights", "is Fate.KEPT", TWICE),
    ),
    *_changes(
        "waits.py",
        "test_schedule.py",
        ("W1", "candidates.update(reader for r in writes", "candidates.update(reader for r in ()"),
        ("W2", "for r in reads | writes if", "for r in reads if"),
        ("W3", "sorted(candidates, reverse=True)", "sorted(candidates)"),
        ("W4", "for r in reads - writes:", "for r in reads & writes:"),
    ),
    *_changes(
        "step.py",
        DECLARED,
        ("S1", 'reads.append("device weights 0")', "pass", TOUCHED),
        ("S43", "stay = fate is Fate.KEPT and not b.reload_weights", "stay = fate is Fate.KEPT"),
        ("S40", "elif kind in (Kind.TAIL, Kind.LOSS):", "elif kind is Kind.TAIL:", MISSING),
        (
            "S41",
            "if not self.trains:",
            "if False:",
            f"{SCHEDULE}test_a_forward_only_step_loads_each_block_once_and_computes_the_loss",
        ),
        (
            "S42",
            "due and self.trains and self.blocks.two_passes",
            "due and self.blocks.two_passes",
            f"{EVALUATION}test_an_evaluation_is_that_of_the_updates_that_were_under_way",
        ),
        (
            "S2",
            'writes.append(f"activations {block}")',
            '(reads if kind is Kind.BACKWARD else writes).append(f"activations {block}")',
        ),
        ("S3", 'reads = [f"host weights {visit.block}", *', "reads = [*"),
        ("S4", "[here], [there], **places", "[], [there], **places"),
        ("S5", 'if parked else f"host slab {slab}"', 'if parked else "verdict"'),
        ("S6", 'COMPUTE, reads, ["verdict", *self.peers]', "COMPUTE, reads, [*self.peers]"),
        ("S7", "visit.block, D2H, [here], [there, *", "visit.block, D2H, [], [there, *"),
        (
            "S170",
            '["evictions"] if visit.block == self.last_evicted else []',
            "list[str]()",
            f"{SCHEDULE}test_no_moments_are_updated_before_the_last_eviction",
        ),
        (
            "S171",
            "max((*blocks.offloaded, *blocks.attention_moved), default=0)",
            "max(blocks.offloaded, default=0)",
            f"{SCHEDULE}test_no_moments_are_updated_before_the_last_eviction",
        ),
        ("S8", "H2D, [there], [here], part", "H2D, [], [here], part", TOUCHED),
        ("S9", "reads, writes = [_weights(block, visit.slot)], ", "reads, writes = list[str](), "),
        ("S10", "next(slots) % b.depth", "0", RINGS),
        ("S11", 'layer, COMPUTE, [], [f"activations {layer}"]', "layer, COMPUTE, [], []"),
        ("S12", "in group[:-1]:", "in group:"),
        ("S13", '[gradients, "verdict", moments]', "[gradients, moments]", TOUCHED),
        ("S14", "next(slabs) % b.depth", "0", RINGS),
        ("S15", "in reversed(group):", "in group:"),
        ("S16", 'return [] if self.blocks.optimizer_overlap else ["updates"]', "return []", SERIAL),
        (
            "S17",
            '[f"host slab {block}", *after], [f"host moments {block}"]',
            '[f"host slab {block}", *after], list[str]()',
            TOUCHED,
        ),
        ("S18", "next(turns) % b.gradient_slabs", "0", RINGS),
        (
            "S19",
            '[f"host slab {block}", *after], [f"host moments {block}"]',
            'after, [f"host moments {block}"]',
        ),
        ("S20", "late, reversed(self.blocks.hosted))", "late, self.blocks.hosted)", LATE),
        (
            "S21",
            "if kind is Kind.TAIL and not self.blocks.clip:",
            "if False:",
            "test_engine_errors.py",
        ),
        (
            "S23",
            "writes.append(_gradients(block, visit.slab))",
            "reads.append(_gradients(block, visit.slab))",
        ),
        ("S24", "block + (b.gradient_slabs if b.pooled else 0)", "block"),
        ("S26", "writes = [_weights(visit.block, visit.slot)]", "writes = list[str]()"),
        ("S27", 'writes = [f"host weights {block}", *', "writes = [*"),
        ("S28", "layer, COMPUTE, [], [here]", "layer, COMPUTE, [], []"),
        (
            "S29",
            "start = 1 if visit.number == 0 else visit.number + self.ahead",
            "start = visit.number + 1",
            AHEAD,
        ),
        ("S30", "in (Kind.FORWARD, Kind.TAIL):", "is Kind.FORWARD:", SPREAD),
        ("S31", "if not self.blocks.keep_activations:", "if True:", ROOM),
        ("S32", "enumerate(turns) if v.fate is not Fate.RECOMPUTED]", "enumerate(turns)]", ROOM),
        ("S47", "if part == 0:", "if part >= 0:", SPREAD),
        (
            "S33",
            "for block in range(self.blocks.num_blocks):",
            "for block in reversed(range(self.blocks.num_blocks)):",
            IN_ORDER,
        ),
        ("Z47", "yield from self.read_first()  # state on disk", "pass  # state on disk", TIER),
        ("Z48", 'moments = f"stage {stage}"', "pass", "test_declared_access.py"),
        ("Z17", "writes = [here, *self.peers]", "writes = [here]", BETWEEN),
        ("Z18", 'writes = [here, "norms", *self.peers]', "writes = [here, *self.peers]", TOLD),
        ("Z19", 'reads = ["norms"] if self.peers and', "reads = [] if False and", TOLD),
        (
            "Z20",
            "            yield from self._gather(block, -1)\n",
            "",
            f"{RANKED}::test_a_pipeline_changes_no_bit",
        ),
        ("Z21", "writes += self.peers  # it is that of all ranks", "pass", EVALUATES),
        ("S34", "max(1, blocks.depth - 1) if blocks.streams == 2 else 1", "1", AHEAD),
        ("S35", "reads += self._updates_done()", "pass", SERIAL),
        ("S36", 'CPU, ["verdict"], []', "CPU, [], []", TOUCHED),
        ("S37", "block, CPU, [there], [parked]", "block, CPU, [], [parked]", TOUCHED),
        ("S38", "block, CPU, [there], [parked]", "block, CPU, [there], []", TOUCHED),
        (
            "S39",
            'reads, writes = [f"device gradients {block}"], [',
            "reads, writes = list[str](), [",
            TOUCHED,
        ),
    ),
    *_changes(
        "pace.py",
        "test_pace.py",
        ("S48", "all(item[-1] < last", "all(item[-1] <= last"),
        ("S49", "range(1, parts)", "range(parts, parts)"),
        ("S50", "or turn < start", ""),
        ("S51", "max(turn + (used == most), start)", "turn + 1"),
    ),
    *_changes(
        "lanes.py",
        CUDA,
        ("L2", "stream.wait_event(wait.event)", "pass"),
        ("L3", "wait.event.synchronize()", "pass"),
        (
            "L4",
            "stream.synchronize()\n        error = self._error",
            "pass\n        error = self._error",
        ),
        ("L5", "self._wait_host(wait.done)", "pass"),
        ("L6", "if self._error is None:", "if True:", "test_engine_errors.py"),
        ("L7", "if isinstance(error, NonFiniteLossError):", "if False:", "test_engine_errors.py"),
        ("L8", "last.done.wait()", "pass", DRAIN),
        (
            "L9",
            "return lane != CPU and isinstance(self._error, NonFiniteLossError)",
            "return False",
            "test_engine_errors.py",
        ),
        (
            "L10",
            "if self._error is None or isinstance(self._error, NonFiniteLossError):",
            "if self._error is None:",
            "test_engine_errors.py",
        ),
    ),
    *_changes(
        "../sweeps/generations.py",
        TRAIN,
        ("V1", "whole[self.keep :]", "whole[self.keep - 1 :]"),
        ("V2", "for other in self._unusable if other != folder", "for other in self._unusable"),
        (
            "V3",
            "if folder in self.found() and folder not in",
            "if folder in self.found() or folder in",
        ),
        ("V4", 'known.pop("sha256", None) != _digest(known)', 'not known.pop("sha256", None)'),
        (
            "V5",
            "        if self._unusable:\n            raise",
            "        if False:\n            raise",
        ),
        ("V6", "key=_step, reverse=True", "key=_step"),
        (
            "V7",
            "        if self._begun is None or not (wait or",
            "        if self._begun is None or (wait and",
        ),
        ("V8", 'self.folder.glob(f".{PREFIX}*")', "()", LEFTOVERS),
    ),
    *_changes(
        "../sweeps/training.py",
        TRAIN,
        ("V9", "self.stream.seek(position.data)", "pass"),
        ("V10", "self._file.truncate(min(num_bytes, path.stat().st_size))", "pass"),
        ("V11", "tokens = self.at.tokens + num_tokens", "tokens = self.at.step * num_tokens"),
        ("V12", "self.recipe.lr_at(step)", "self.recipe.lr_at(step + 1)", LOGGED),
        ("V13", "self.unsaved = one_line(error)\n", "pass\n"),
        (
            "V14",
            "if time.monotonic() + self._save_s * (1 + self.states.writing) > self._deadline:",
            "if False:",
        ),
    ),
    *_changes(
        "../sweeps/train.py",
        TRAIN,
        ("V15", "if other[key] != known[key]", "if False"),
        ("V16", "if training.unsaved:", "if False:"),
    ),
    *_changes(
        "../baselines/rival.py",
        TRAIN,
        ("V17", "    require_sealed(path.parent)\n", ""),
    ),
    *_changes(
        "saving.py",
        TRAIN,
        ("V18", " and digest(path) == sha256", ""),
    ),
)

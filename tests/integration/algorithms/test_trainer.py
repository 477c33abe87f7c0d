"""A step of the trainer under each algorithm against transformers' log-probs and loops over tokens; roles; the critic."""

from __future__ import annotations

import math

import pytest
import torch

from tests.integration.algorithms.conftest import ESTIMATORS, LAYOUTS, SPREAD, TOKEN_KL, WHITENED
from tests.integration.algorithms.own_hooks import SILENCED
from tests.integration.algorithms.worker import batch_of, values_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def log_probs(models):
    """log_probs(role, sample): natural logs of the response's tokens, by transformers."""
    from transformers import AutoModelForCausalLM

    loaded = {name: AutoModelForCausalLM.from_pretrained(path) for name, path in models.items()}

    def of(role, sample):
        tokens = torch.tensor(sample.tokens)
        with torch.no_grad():
            table = torch.log_softmax(loaded[role](tokens[None]).logits[0, :-1].double(), -1)
        return table.gather(-1, tokens[1:, None])[-sample.response_length :, 0].tolist()

    return of


def trained(sample):
    return [t for t in range(sample.response_length) if sample.loss_mask[t]]


def mean(samples, values):
    """Over each rollout's trained tokens, then over rollouts; values[sample][trained token]."""
    return sum(sum(row) / len(row) for row in values if row) / len(samples)


def advantages_of(name, samples, log_probs):
    """Advantages and returns by loops over the trained tokens."""
    advantages, returns = [], []
    for sample in samples:
        at, v = trained(sample), values_of(sample.sample_id, sample.response_length).tolist()
        policy, reference = log_probs("policy", sample), log_probs("reference", sample)
        kl = [policy[t] - reference[t] for t in at]
        r = [-0.2 * k for k in kl]
        if at:
            r[-1] += sample.reward
        if name == "reinforce_plus_plus":
            a = [sum(r[n:]) for n in range(len(at))]
        elif name == "reinforce_plus_plus_baseline":
            a = [sample.reward - 0.2 * k for k in kl]
        elif name == "ppo":
            after = [v[t] for t in at[1:]] + [0.0]
            delta = [r[n] + 0.95 * after[n] - v[at[n]] for n in range(len(at))]
            a = [sum((0.95 * 0.9) ** (k - n) * delta[k] for k in range(n, len(at))) for n in range(len(at))]
        else:
            a = [sample.reward] * len(at)
        advantages.append(a)
        returns.append([x + v[t] for x, t in zip(a, at, strict=True)])
    if name in WHITENED:
        flat = [x for row in advantages for x in row]
        center = sum(flat) / len(flat)
        scale = math.sqrt(sum((x - center) ** 2 for x in flat) / (len(flat) - 1) + 1e-8)
        advantages = [[(x - center) / scale for x in row] for row in advantages]
    return advantages, returns


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_first_steps_metrics_equal_loops_over_tokens(results, log_probs, name):
    samples = batch_of(0).samples
    advantages, _ = advantages_of(name, samples, log_probs)
    policies, references = ([log_probs(role, sample) for sample in samples] for role in ("policy", "reference"))
    tis = [[min(math.exp(p[t] + 1.0), 2.0) for t in trained(s)] for p, s in zip(policies, samples, strict=True)]  # the engine said -1
    if name == "rloo":  # --tis-batch-normalize
        flat = [w for row in tis for w in row]
        tis = [[w * len(flat) / sum(flat) for w in row] for row in tis]
    pg, masked, kl = [], [], []
    for sample, a, policy, reference, weights in zip(samples, advantages, policies, references, tis, strict=True):
        at = trained(sample)
        drift = sum(-1.0 - policy[t] for t in at) / max(len(at), 1)
        silent = [x < 0 and drift > 1e-4 for x in a]
        surrogate = [-x * (policy[t] if name == "cispo" else 1.0) for x, t in zip(a, at, strict=True)]  # every ratio is 1
        pg.append([s * w * (not m) for s, w, m in zip(surrogate, weights, silent, strict=True)])
        masked.append([float(m) for m in silent])
        kl.append([math.exp(reference[t] - policy[t]) - 1 + policy[t] - reference[t] for t in at])
    (metrics,) = results(name)["metrics"]
    assert metrics["train/pg_loss"] == pytest.approx(mean(samples, pg), abs=2e-5)
    assert metrics["train/tis"] == pytest.approx(mean(samples, tis), abs=1e-5)
    assert metrics["train/opsm_clipfrac"] == pytest.approx(mean(samples, masked), abs=1e-6)
    assert abs(metrics["train/ppo_kl"]) < 1e-6
    if name not in TOKEN_KL:
        assert metrics["train/kl_loss"] == pytest.approx(mean(samples, kl), abs=1e-5)
    assert metrics["train/grad_norm"] > 0


def test_means_over_the_steps_tokens_are_metrics(results, log_probs):
    samples = batch_of(0).samples
    advantages, returns = advantages_of("ppo", samples, log_probs)
    (ppo,), (opd,) = results("ppo")["metrics"], results("opd")["metrics"]
    count = sum(map(len, advantages))
    values = [values_of(s.sample_id, s.response_length)[t].item() for s in samples for t in trained(s)]
    policy, teacher = (sum(log_probs(role, s)[t] for s in samples for t in trained(s)) / count for role in ("policy", "teacher"))
    expected = {
        "rollout/advantages": sum(map(sum, advantages)) / count, "rollout/returns": sum(map(sum, returns)) / count,
        "rollout/values": sum(values) / count, "rollout/log_probs": policy, "rollout/rollout_log_probs": -1.0,
    }  # fmt: skip
    assert {name: ppo[name] for name in expected} == pytest.approx(expected, abs=1e-5)
    assert opd["rollout/opd_reverse_kl"] == pytest.approx(policy - teacher, abs=1e-5)
    assert "rollout/ref_log_probs" in ppo
    assert "rollout/ref_log_probs" not in opd


def test_the_returns_are_handed_out_for_the_critic(results, log_probs):
    batch = batch_of(0)
    _, returns = advantages_of("ppo", batch.samples, log_probs)
    (step,) = results("ppo")["returns"]
    got = []
    for packed, micro in zip(step, batch.steps[0].micro_batches, strict=True):
        expected = [returns[i] for i in micro]
        got.append(packed[packed != 0].tolist())
        assert got[-1] == pytest.approx([x for row in expected for x in row], abs=1e-5)


def test_a_teacher_in_the_trainer_gives_each_token_its_reverse_divergence(results, log_probs):
    samples = batch_of(0).samples
    pg = []
    for sample in samples:
        policy, teacher = log_probs("policy", sample), log_probs("teacher", sample)
        pg.append([-(sample.reward - 0.5 * (policy[t] - teacher[t])) for t in trained(sample)])
    (metrics,) = results("opd")["metrics"]
    assert metrics["train/pg_loss"] == pytest.approx(mean(samples, pg), abs=1e-5)


def test_the_reference_follows_the_policy_and_is_saved_with_it(results):
    moving, still = ([m["train/kl_loss"] for m in results(name)["metrics"]] for name in ("moving", "still"))
    assert moving[:2] == still[:2]
    assert moving[2] == pytest.approx(0.0, abs=1e-10)  # after two steps the reference became the policy
    assert still[2] > 1e-3
    assert results("moved")["metrics"][0]["train/kl_loss"] == pytest.approx(0.0, abs=1e-10)


def test_the_old_policy_of_stale_data_is_the_one_that_generated_it(results, log_probs):
    """Both steps' data is of version 0, and the second step starts from weights that were trained since."""
    first, second = results("stale")["metrics"]
    for number, metrics in ((0, first), (1, second)):
        samples = batch_of(number).samples
        distance = [[abs(log_probs("policy", sample)[t] + 1.0) for t in trained(sample)] for sample in samples]
        assert metrics["train/train_rollout_logprob_abs_diff"] == pytest.approx(mean(samples, distance), abs=1e-5)
    assert abs(first["train/ppo_kl"]) < 1e-7
    assert abs(second["train/ppo_kl"]) > 1e-4


def test_the_policy_comes_back_from_the_other_roles_bit_for_bit(results, models):
    """In a critic-only step nothing is updated; the reference has been in the model for its log-probs meanwhile."""
    from safetensors.torch import load_file

    start = load_file(models["policy"] + "/model.safetensors")
    stored = results("critic_first")
    assert "train/pg_loss" not in stored["metrics"][0]
    assert all(torch.equal(stored["weights"][name], start[name]) for name in start if name != "lm_head.weight")


@pytest.mark.parametrize("name", ["reset", "stateless"])
def test_moments_that_are_forgotten_leave_each_rollout_step_to_itself(results, name):
    """The first rollout step is as without the flag; the learning rate is constant, so later ones differ by their moments alone."""
    forgetful, whole = results(name), results("steps")
    assert forgetful["metrics"][0]["train/loss"] == whole["metrics"][0]["train/loss"]
    assert forgetful["metrics"][2]["train/loss"] != pytest.approx(whole["metrics"][2]["train/loss"], abs=1e-4)
    assert all(torch.equal(results("reset")["weights"][n], w) for n, w in results("stateless")["weights"].items())
    assert (forgetful["moments"] == 0) == (name == "stateless")
    assert whole["moments"] > 0


def test_a_run_with_stateless_adam_resumes(results):
    """What is saved has moments of 0, so that every layout and every other optimizer setting can load it."""
    assert results("stateless_rest")["metrics"][0]["train/grad_norm"] == results("stateless")["metrics"][2]["train/grad_norm"]
    assert all(torch.equal(results("stateless")["weights"][n], w) for n, w in results("stateless_rest")["weights"].items())


def test_the_entropy_of_the_old_policy_is_a_metric(results, models):
    from transformers import AutoModelForCausalLM

    model, total, count = AutoModelForCausalLM.from_pretrained(models["policy"]), 0.0, 0
    for sample in batch_of(0).samples:
        with torch.no_grad():
            table = torch.log_softmax(model(torch.tensor(sample.tokens)[None]).logits[0, :-1].double(), -1)
        entropy = -(table.exp() * table).sum(-1)[-sample.response_length :]
        total += sum(float(entropy[t]) for t in trained(sample))
        count += len(trained(sample))
    assert results("gspo")["metrics"][0]["rollout/entropy"] == pytest.approx(total / count, abs=1e-5)
    assert "rollout/entropy" not in results("grpo")["metrics"][0]


def test_hooks_are_called_at_their_places(results, models):
    from safetensors.torch import load_file

    tables = {r: load_file(models[r] + "/model.safetensors")["model.embed_tokens.weight"].double().sum() for r in ("policy", "reference")}
    init, *calls = results("hooked")["calls"]
    assert init == ("init", True, models["policy"])
    assert [call[:3] for call in calls if call[0] == "step"] == [("step", 0, 0), ("step", 0, 1), ("step", 1, 0), ("step", 1, 1)]
    assert [call[3:] for call in calls if call[0] == "step"] == [(True, number, True, "policy_loss") for number in range(4)]
    passes = ["log_prob", "log_prob", "step", "step"]
    assert [call[0] for call in calls] == passes * 2
    assert [call[1] for call in calls if call[0] == "log_prob"] == ["ref_", ""] * 2
    seen = [call[2] for call in calls if call[0] == "log_prob"]
    assert seen[:3:2] == pytest.approx([tables["reference"].item()] * 2, abs=1e-6)
    assert seen[1] == pytest.approx(tables["policy"].item(), abs=1e-6)
    assert abs(seen[3] - seen[1]) > 1e-3  # the policy was trained meanwhile


def test_a_critic_calls_the_hooks_as_such(results):
    calls = results("critic")["calls"]
    assert [call[0] for call in calls] == ["init"] + ["step"] * 30
    assert {call[-1] for call in calls[1:]} == {"value_loss"}


def test_what_the_postprocess_hook_leaves_is_trained_on(results):
    """Advantages twice as large; a silenced sample adds nothing, and counts in the mean as before."""
    samples = batch_of(0).samples
    pg = [[-2 * sample.reward * (sample.sample_id != SILENCED) for _ in trained(sample)] for sample in samples]
    stored = results("postprocessed")
    assert stored["metrics"][0]["train/pg_loss"] == pytest.approx(mean(samples, pg), abs=2e-5)
    ((name, rollout_id, names),) = stored["calls"]
    assert (name, rollout_id) == ("data", 0)
    assert {"advantages", "returns", "loss_masks", "rollout_log_probs", "tokens"} <= set(names)
    assert [call for rank in (0, 1) for call in results("postprocessed_pp2", rank)["calls"]] == stored["calls"]  # the last stage's alone


def test_a_model_of_ones_own_is_trained(results, models):
    """Against transformers with the final norm's weight halved, which halves the hidden states."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(models["policy"])
    model.model.norm.weight.data /= 2
    distance, samples = [], batch_of(0).samples
    for sample in samples:
        tokens = torch.tensor(sample.tokens)
        with torch.no_grad():
            table = torch.log_softmax(model(tokens[None]).logits[0, :-1].double(), -1)
        found = table.gather(-1, tokens[1:, None])[-sample.response_length :, 0]
        distance.append([abs(float(found[t]) + 1.0) for t in trained(sample)])
    assert results("provided")["metrics"][0]["train/train_rollout_logprob_abs_diff"] == pytest.approx(mean(samples, distance), abs=1e-5)
    assert results("provided")["calls"] == [("provide", True, True, None)]
    assert [results("provided_pp2", rank)["calls"] for rank in (0, 1)] == [
        [("provide", True, False, None)],
        [("provide", False, True, None)],
    ]


def test_the_critic_learns_its_returns(results):
    stored = results("critic")
    losses = [m["train/critic-value_loss"] for m in stored["metrics"]]
    assert not any(micro.any() for micro in stored["values"][0][0])  # it begins at 0
    samples = batch_of(0).samples
    targets = [[float(int(s.tokens[s.length - s.response_length + t]) % 7) ** 2 for t in trained(s)] for s in samples]
    assert losses[0] == pytest.approx(mean(samples, targets), abs=1e-4)
    assert losses[-1] < 0.2 * losses[0]
    assert stored["metrics"][0]["train/critic-lr-pg_0"] == 2e-2


def test_what_is_frozen_is_so_in_the_critic_and_its_head_learns(results):
    stored = results("critic_frozen")
    assert stored["frozen"]
    assert all("word_embeddings" in name or ".layers.0." in name for name in stored["frozen"])
    losses = [m["train/critic-value_loss"] for m in stored["metrics"]]
    assert losses[1] < losses[0]
    assert not results("critic")["frozen"]


def test_a_saved_critic_goes_on_as_if_nothing_had_happened(results):
    whole, rest = results("critic"), results("critic_rest")
    assert [m["train/critic-value_loss"] for m in rest["metrics"]] == [m["train/critic-value_loss"] for m in whole["metrics"][15:]]


@pytest.mark.parametrize(("name", "layout"), SPREAD)
def test_two_processes_compute_the_same_step(results, name, layout):
    (one,), (two,) = results(name)["metrics"], results(f"{name}_{layout}")["metrics"]
    names = [key for key in one if key.startswith(("train/", "rollout/"))]
    assert {key: two[key] for key in names} == pytest.approx({key: one[key] for key in names}, rel=2e-5, abs=2e-6)
    assert results(f"{name}_{layout}", 1)["metrics"][0].keys() == two.keys()


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_critic_over_two_processes_learns_the_same(results, layout):
    one, two = (results(name)["metrics"][:3] for name in ("critic", f"critic_{layout}"))
    for name in ("train/critic-value_loss", "train/critic-grad_norm", "train/critic-values"):
        assert [m[name] for m in two] == pytest.approx([m[name] for m in one], rel=1e-4, abs=1e-6)

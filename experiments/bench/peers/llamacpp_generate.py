"""Peer `llamacpp`: llama.cpp through llama-cpp-python's low-level interface, float32 weights, forced lengths.

A row leaves the batch when it has its tokens, as a serving engine would do it; every prompt is prefilled. Tokens are drawn in C
from the whole law at the temperature.

Config: `gguf` (a model in any quantisation; dequantised once into the scratch folder), `temperature`, `seed`, `threads`.
Request: `prompts` (lists of token ids), `lengths` (new tokens of each).
"""

import ctypes
import pathlib

import gguf
import llama_cpp
import protocol


def dequantised(source: str, target: pathlib.Path) -> pathlib.Path:
    """A copy of a GGUF file with all tensors in float32."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        kind, inner = field.types[0], field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def script(channel: protocol.Channel, config: dict) -> None:
    silent = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    path = dequantised(config["gguf"], pathlib.Path(config["scratch"]) / "f32.gguf")
    settings = llama_cpp.llama_model_default_params()
    settings.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), settings)
    if not model:
        raise RuntimeError(f"llama.cpp cannot read {path}")
    seed = config.get("seed", 0)

    def run(request: dict) -> dict:
        nonlocal seed
        seed += 1
        prompts, lengths = request["prompts"], request["lengths"]
        tokens = sum(map(len, prompts))
        how = llama_cpp.llama_context_default_params()
        how.n_ctx = sum(len(p) + n for p, n in zip(prompts, lengths)) + 256 * len(prompts)
        how.n_batch, how.n_ubatch, how.n_seq_max = max(tokens, 512), 512, len(prompts)
        how.n_threads = how.n_threads_batch = config["threads"]
        how.kv_unified = True
        context = llama_cpp.llama_init_from_model(model, how)
        if not context:
            raise RuntimeError("llama.cpp made no context")
        sampler = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        llama_cpp.llama_sampler_chain_add(sampler, llama_cpp.llama_sampler_init_temp(config.get("temperature", 1.0)))
        llama_cpp.llama_sampler_chain_add(sampler, llama_cpp.llama_sampler_init_dist(seed))
        batch = llama_cpp.llama_batch_init(max(tokens, 512), 0, 1)

        def put(i, token, position, sequence, wanted):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
            batch.seq_id[i][0] = sequence

        def decode(count):
            batch.n_tokens = count
            if llama_cpp.llama_decode(context, batch) != 0:
                raise RuntimeError(f"llama_decode failed with {count} tokens")

        last, i = [], 0
        for row, prompt in enumerate(prompts):
            for position, token in enumerate(prompt):
                put(i, token, position, row, position == len(prompt) - 1)
                i += 1
            last.append(i - 1)
        decode(i)
        drawn = [[llama_cpp.llama_sampler_sample(sampler, context, place)] for place in last]
        while active := [row for row, n in enumerate(lengths) if len(drawn[row]) < n]:
            for i, row in enumerate(active):
                put(i, drawn[row][-1], len(prompts[row]) + len(drawn[row]) - 1, row, True)
            decode(len(active))
            for i, row in enumerate(active):
                drawn[row].append(llama_cpp.llama_sampler_sample(sampler, context, i))
        llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_sampler_free(sampler)
        llama_cpp.llama_free(context)
        record = {"tokens": sum(map(len, drawn))}
        return {**record, "ids": drawn} if request.get("return_ids") else record

    protocol.serve(channel, {"llama_cpp_python": llama_cpp.__version__, "threads": config["threads"]}, run)


if __name__ == "__main__":
    protocol.main(script)

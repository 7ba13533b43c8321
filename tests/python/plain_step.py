"""A step in plain torch, from what a step computes and where its bytes lie; nothing of the library is used. Scores are summed
in FP64, which holds every product of codes and scales exactly."""

from typing import NamedTuple

import torch

PAGE = 64
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
LARGEST_BF16 = torch.finfo(torch.bfloat16).max


def is_mxfp4(cache_format):
    return cache_format.startswith("mxfp4")


def bf16(x):
    """Rounded to BF16, as FP32."""
    return x.to(torch.bfloat16).float()


def project(x, weights):
    return (x.double() @ weights.double().T).float().to(torch.bfloat16)


def power_of_two(exponent):
    return (exponent.long() + 1023 << 52).view(torch.float64)


# ---- number formats --------------------------------------------------------------------------------------------------------
class Quantised(NamedTuple):
    """Bytes of vectors of 128 columns in four blocks of 32: payload [..., 4, 32 or 16], scales [..., 4]."""

    payload: torch.Tensor
    scales: torch.Tensor


def largest(x):
    return torch.where(x.isnan(), 0, x.abs()).amax(-1)


def e4m3(x):
    codes = x.clamp(-448, 448).float().to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(x.isnan(), 0x7F, codes)


def e2m1(x):
    """Halfway cases go to the even code: that of the larger number at 0.75, 1.75 and 3.5."""
    magnitude = torch.where(x.isnan(), 6, x.abs())
    code = sum((magnitude > middle).byte() for middle in (0.25, 1.25, 2.5, 5))
    code += sum((magnitude >= middle).byte() for middle in (0.75, 1.75, 3.5))
    return code + 8 * (x.signbit() & ~x.isnan()).byte()


def quantise_fp8(x):
    """Codes, and exponents k of scales 2^k = 2^ceil(log2(amax / 448)); 448 is 0.875 * 2^9."""
    mantissa, exponent = torch.frexp(largest(x).clamp(1e-10, LARGEST_BF16))
    exponent = exponent - 9 + (mantissa > 0.875)
    return e4m3(x.double() * power_of_two(-exponent).unsqueeze(-1)), exponent


def quantise_mxfp4(x):
    """Scales 2^ceil(log2(amax / 6)) of blocks; 6 is 0.75 * 2^3. The even column of two in the low bits."""
    blocks = x.unflatten(-1, (4, 32))
    amax = largest(blocks)
    mantissa, exponent = torch.frexp(amax.clamp(6 * 2.0**-126, LARGEST_BF16))
    exponent = torch.where(amax.isinf(), 127, exponent - 3 + (mantissa > 0.75))
    codes = e2m1(blocks.double() * power_of_two(-exponent).unsqueeze(-1))
    return Quantised(codes[..., 0::2] | codes[..., 1::2] << 4, (exponent + 127).byte())


def quantise_key(cache_format, x):
    if is_mxfp4(cache_format):
        return quantise_mxfp4(x)
    codes, exponent = quantise_fp8(x)
    if cache_format == "fp8_mx":
        scales = (exponent + 127).byte().unsqueeze(-1).repeat_interleave(4, -1)
    else:
        scales = power_of_two(exponent).float().unsqueeze(-1).view(torch.uint8)
    return Quantised(codes.unflatten(-1, (4, 32)), scales)


def numbers(cache_format, key):
    """What the bytes of keys stand for [..., 128]."""
    if cache_format == "fp8":
        scales = key.scales.contiguous().view(torch.float32).double()
    else:
        scales = power_of_two(key.scales.int() - 127)
    if is_mxfp4(cache_format):
        codes = torch.stack([key.payload & 15, key.payload >> 4], -1).flatten(-2).long()
        values = torch.tensor([*E2M1, *(-x for x in E2M1)], dtype=torch.float64, device=codes.device)[codes]
    else:
        values = key.payload.contiguous().view(torch.float8_e4m3fn).float().double()
    return (values * scales.unsqueeze(-1)).flatten(-2)


# ---- pages -----------------------------------------------------------------------------------------------------------------
def sections(cache_format, cache):
    """Views of a cache's bytes: payload [pages, 64 tokens, 4 blocks, bytes], scales [pages, token / 16, token % 16, 4]."""
    payload_bytes = 4096 if is_mxfp4(cache_format) else 8192
    payload, scales = cache[:, :payload_bytes], cache[:, payload_bytes : payload_bytes + 256].unflatten(1, (4, 16, 4))
    if cache_format == "mxfp4_rowgroup":
        return payload.unflatten(1, (4, PAGE, 16)).transpose(1, 2), scales.permute(0, 3, 2, 1)
    return payload.unflatten(1, (PAGE, 4, payload_bytes // 256)), scales


def store(cache_format, cache, slots, keys):
    payload, scales = sections(cache_format, cache)
    quantised = quantise_key(cache_format, keys)
    page, token = slots // PAGE, slots % PAGE
    payload[page, token] = quantised.payload
    scales[page, token // 16, token % 16] = quantised.scales


def load(cache_format, cache, pages):
    """Keys of these pages, in order."""
    payload, scales = (section[pages] for section in sections(cache_format, cache))
    return numbers(cache_format, Quantised(payload.flatten(0, 1), scales.flatten(0, 2)))


# ---- stages ----------------------------------------------------------------------------------------------------------------
def live_rows(seq_lens, query_lens, rows):
    """Request and bound of each row that is no padding."""
    found = []
    for request, (length, queries) in enumerate(zip(seq_lens.tolist(), query_lens.tolist())):
        found += [(request, length - queries + row + 1) for row in range(queries)]
    return found[:rows]


def sum_in_lanes(x):
    """Of 128 columns in FP32 and in the one order: 16 lanes from left to right, then pairs of lanes 8, 4, 2 and 1 apart."""
    lanes = x.unflatten(-1, (16, 8))
    total = torch.zeros_like(lanes[..., 0])
    for column in range(8):
        total = total + lanes[..., column]
    for distance in (8, 4, 2, 1):
        total = total + total[..., torch.arange(16, device=x.device) ^ distance]
    return total[..., :1]


def layer_norm(x, weight, bias, eps):
    centred = x - sum_in_lanes(x) / 128
    variance = sum_in_lanes(centred * centred) / 128
    return bf16(centred * (1 / torch.sqrt(variance + eps)) * weight + bias)


def query_and_weights(cache_format, iq, head_weights):
    """Queries [rows, heads, 128] and head weights [rows, heads], the FP8 query's scale in the latter."""
    heads = head_weights.shape[1]
    factor = torch.tensor((heads * 128) ** -0.5, dtype=torch.float32, device=iq.device)
    query = iq.float().unflatten(1, (heads, 128))
    if is_mxfp4(cache_format):
        return numbers(cache_format, quantise_mxfp4(query)), bf16(head_weights.float() * factor)
    codes, exponent = quantise_fp8(query)
    weights = head_weights.float() * power_of_two(exponent).float() * factor
    return codes.view(torch.float8_e4m3fn).float().double(), bf16(weights) if cache_format == "fp8_mx" else weights


def insert(cache_format, cache, block_table, rows, keys):
    """Each row's key at the position before its bound."""
    slots = [block_table[request, (end - 1) // PAGE] * PAGE + (end - 1) % PAGE for request, end in rows]
    store(cache_format, cache, torch.stack(slots).long(), keys[: len(rows)])


def score(cache_format, cache, block_table, rows, query, weights):
    """The logits of each row up to its bound."""
    logits = []
    for row, (request, end) in enumerate(rows):
        keys = load(cache_format, cache, block_table[request, : -(-end // PAGE)].long())[:end]
        dots = keys @ query[row].T
        logits.append(dots.clamp(min=0) @ weights[row].double())  # clamp() keeps NaN
    return logits


def ranks(logits):
    return torch.where(logits.isnan(), -torch.inf, logits) + 0.0  # -0 becomes +0


def select(logits, top_k):
    """The best by logit, the lower position where two are equal, in ascending order."""
    return torch.sort(ranks(logits), descending=True, stable=True).indices[:top_k].sort().values

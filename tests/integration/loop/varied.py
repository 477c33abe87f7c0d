"""A reward that differs from response to response, so that every step of an untrained model has a gradient."""


async def reward(args, sample, **kwargs):
    """A number in [0, 1) made of the response's token ids."""
    return sum(sample.tokens[-sample.response_length :]) % 7 / 7

"""The layers of known networks: how many parameters each has, and how much a sample computes in it.

Normalisation belongs to the layer before it, a bias to its weights. Work is multiplications of a forward
pass. Layers without parameters (pooling, activations) compute little, and are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple


class Shape(NamedTuple):
    """A layer of a network: its parameters, and the multiplications of one sample in its forward pass."""

    name: str
    n_parameters: int
    work: int


def _convolution(name: str, inputs: int, outputs: int, kernel: int, side: int, extra: int) -> Shape:
    """A convolution whose output has `side` x `side` places; `extra` parameters for each output."""
    weights = inputs * outputs * kernel**2
    return Shape(name, weights + extra * outputs, weights * side**2)


def _full(name: str, inputs: int, outputs: int) -> Shape:
    return Shape(name, inputs * outputs + outputs, inputs * outputs)


def vgg19() -> list[Shape]:
    """Return VGG-19 for images of 224 x 224: 16 convolutions, 3 full layers, 143,667,240 parameters.

    Source: K. Simonyan, A. Zisserman, Very deep convolutional networks for large-scale image recognition,
    ICLR 2015, table 1, column E.
    """
    found, channels, side = [], 3, 224
    for block, (width, n) in enumerate(((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)), 1):
        for number in range(1, n + 1):
            found.append(_convolution(f"conv{block}_{number}", channels, width, 3, side, 1))
            channels = width
        side //= 2
    return [*found, _full("fc6", 512 * 7**2, 4096), _full("fc7", 4096, 4096), _full("fc8", 4096, 1000)]


def resnet50() -> list[Shape]:
    """Return ResNet-50 for images of 224 x 224: 53 convolutions, a full layer, 25,557,032 parameters.

    Each convolution has two parameters of its batch normalisation for each output. The stride of a stage is
    in its 3 x 3 convolution, as in torchvision.

    Source: K. He, X. Zhang, S. Ren, J. Sun, Deep residual learning for image recognition, CVPR 2016, table 1.
    """
    found = [_convolution("conv1", 3, 64, 7, 112, 2)]
    channels, side = 64, 56
    for stage, (width, n) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), 2):
        for block in range(1, n + 1):
            name, out = f"conv{stage}_{block}", 56 >> (stage - 2)
            found += [
                _convolution(f"{name}.1", channels, width, 1, side, 2),
                _convolution(f"{name}.2", width, width, 3, out, 2),
                _convolution(f"{name}.3", width, 4 * width, 1, out, 2),
            ]
            if block == 1:
                found.append(_convolution(f"{name}.shortcut", channels, 4 * width, 1, out, 2))
            channels, side = 4 * width, out
    return [*found, _full("fc", 2048, 1000)]


def alexnet() -> list[Shape]:
    """Return AlexNet on one device, for images of 224 x 224: 5 convolutions, 3 full layers, 61,100,840.

    Source: A. Krizhevsky, One weird trick for parallelizing convolutional neural networks,
    arXiv:1404.5997, 2014, as torchvision has it; it is that of Krizhevsky, Sutskever, Hinton, NIPS 2012,
    without the cut into two halves.
    """
    return [
        _convolution("conv1", 3, 64, 11, 55, 1),
        _convolution("conv2", 64, 192, 5, 27, 1),
        _convolution("conv3", 192, 384, 3, 13, 1),
        _convolution("conv4", 384, 256, 3, 13, 1),
        _convolution("conv5", 256, 256, 3, 13, 1),
        _full("fc6", 256 * 6**2, 4096),
        _full("fc7", 4096, 4096),
        _full("fc8", 4096, 1000),
    ]


def lenet() -> list[Shape]:
    """Return LeNet-5 for images of 32 x 32, with all maps connected: 61,706 parameters.

    Source: Y. LeCun, L. Bottou, Y. Bengio, P. Haffner, Gradient-based learning applied to document
    recognition, Proc. IEEE 86, 1998, figure 2; its second convolution leaves out some connections, which
    today's do not.
    """
    return [
        _convolution("conv1", 1, 6, 5, 28, 1),
        _convolution("conv2", 6, 16, 5, 10, 1),
        _full("fc3", 16 * 5**2, 120),
        _full("fc4", 120, 84),
        _full("fc5", 84, 10),
    ]


def mnist_1m() -> list[Shape]:
    """Return a perceptron for the digits of MNIST, 784-800-400-100-10: 989,510 parameters.

    No publication has it: it is the size of a small training with about a million parameters. A hidden layer
    of 800 is that of P. Simard, D. Steinkraus, J. Platt, ICDAR 2003.
    """
    widths = (784, 800, 400, 100, 10)
    return [_full(f"fc{at}", *widths[at - 1 : at + 1]) for at in range(1, len(widths))]


def bert_base() -> list[Shape]:
    """Return BERT-base, uncased, for 128 tokens: 12 blocks, embeddings, pooler, 109,482,240 parameters.

    The gradient of the embeddings is sent as a whole, as a dense one.

    Source: J. Devlin, M.-W. Chang, K. Lee, K. Toutanova, BERT: Pre-training of deep bidirectional
    transformers for language understanding, NAACL 2019, section 3; 30,522 pieces of words.
    """
    width, inner, tokens = 768, 3072, 128
    found = [Shape("embeddings", (30522 + 512 + 2) * width + 2 * width, 0)]

    def dense(name: str, inputs: int, outputs: int, extra: int = 0, more_work: int = 0) -> Shape:
        weights = inputs * outputs
        return Shape(name, weights + outputs + extra, weights * tokens + more_work)

    for block in range(1, 13):
        found += [
            dense(f"block{block}.query", width, width),
            dense(f"block{block}.key", width, width, more_work=tokens**2 * width),
            dense(f"block{block}.value", width, width, more_work=tokens**2 * width),
            dense(f"block{block}.attention", width, width, extra=2 * width),
            dense(f"block{block}.inner", width, inner),
            dense(f"block{block}.outer", inner, width, extra=2 * width),
        ]
    return [*found, _full("pooler", width, width)]


NETWORKS: Mapping[str, Callable[[], list[Shape]]] = {
    "vgg19": vgg19,
    "resnet50": resnet50,
    "alexnet": alexnet,
    "lenet": lenet,
    "mnist-1m": mnist_1m,
    "bert-base": bert_base,
}

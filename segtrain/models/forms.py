"""`model.variant`: the details in which networks of one name differ between their publishers.

The weights of a publisher need its form. To add one: a row here and its name in config/model.py.
"""

from dataclasses import dataclass

from segtrain.config import ModelConfig


@dataclass(frozen=True)
class Form:
    """One form of backbones and heads.

    contract_dilation: of ResNets: the first block of a dilated stage keeps the dilation of the
        stage before; False: all blocks of a stage alike.
    mobilenet_contract: the same of MobileNets.
    mobilenet_v3_aux: the layer that the auxiliary head of MobileNetV3 reads, counted from 0.
    basic_block_both: both 3x3 convolutions of ResNet-18's and 34's blocks are dilated; False: the
        first alone.
    multi_grid_factors: `multi_grid` multiplies the dilation of the stage; False: its numbers are
        the dilations.
    pyramid_global_norm: pyramid pooling has a norm in the branch of bin 1; False: a bias.
    pyramid_join, pyramid_classifier: kernels of the convolution that joins pyramid pooling's
        branches, and of PSPNet's classifier.
    aspp_join: kernel of the convolution that joins the branches of ASPP; with 3, DeepLabV3 has no
        further 3x3 convolution.
    aspp_conv: DeepLabV3+ has a 3x3 convolution between ASPP and the low-level features.
    decoder_convs: 3x3 convolutions of DeepLabV3+ after these are joined.
    separable_norm: norm and ReLU between the two parts of a separable convolution.
    stretch: features and logits are stretched over the image where its sides are no multiples of
        their stride; False: each value stays over its pixels, see `resizing.enlarge`.
    """

    contract_dilation: bool = True
    mobilenet_contract: bool = True
    mobilenet_v3_aux: int = 12
    basic_block_both: bool = True
    multi_grid_factors: bool = True
    pyramid_global_norm: bool = True
    pyramid_join: int = 3
    pyramid_classifier: int = 1
    aspp_join: int = 1
    aspp_conv: bool = False
    decoder_convs: int = 2
    separable_norm: bool = True
    stretch: bool = True


FORMS = {
    "paper": Form(stretch=False),
    "torchvision": Form(mobilenet_contract=False, mobilenet_v3_aux=4),
    "semseg": Form(contract_dilation=False, mobilenet_contract=False),
    "mmseg": Form(
        mobilenet_contract=False, basic_block_both=False, multi_grid_factors=False, aspp_join=3
    ),
    "smp": Form(
        contract_dilation=False,
        mobilenet_contract=False,
        pyramid_global_norm=False,
        pyramid_join=1,
        pyramid_classifier=3,
        aspp_conv=True,
        decoder_convs=1,
        separable_norm=False,
    ),
    "vainf": Form(decoder_convs=1, separable_norm=False),
}


def form_of(model: ModelConfig) -> Form:
    """The form that `model.variant` names."""
    return FORMS[model.variant]

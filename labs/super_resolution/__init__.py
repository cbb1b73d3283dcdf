"""Lab 11: super-resolution of infrared frames by a small GAN, one code path for TPU, CUDA and CPU.

After SRGAN (Ledig et al. 2017, arXiv 1609.04802) and the ideas of Fast-SRGAN: the paper's two
networks and losses, with inverted residual blocks so that the generator is fast. What a device is,
where a step ends and who writes is the project's own (:mod:`mshnet.training.backend`).

========================= ====================================================================
:mod:`.networks`          generator and discriminator
:mod:`.losses`            pixel, perceptual (without downloaded weights, or VGG), adversarial
:mod:`.frames`            infrared frames, their low-resolution versions, random crops
:mod:`.training`          settings, the two steps, the run: log, checkpoints, resuming
:mod:`.tiles`             whole frames by overlapping tiles, without seams
:mod:`.quality`           PSNR and SSIM against bicubic
:mod:`.detect`            does it help MSHNet find small targets?
:mod:`.benchmark`         a step and a frame on every device that is here
:mod:`.check`             package, device, operations, loading a model
:mod:`.pictures`          curves and comparisons
========================= ====================================================================

``python -m labs.super_resolution --help`` lists the commands.
"""

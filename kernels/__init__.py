"""The bundled Triton kernels, a folder per operation; judged through an adapter like anyone else's."""

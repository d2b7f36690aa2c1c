"""Views, axes and strides: how passes read and keep them."""

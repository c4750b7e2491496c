"""OCI images on this machine: names, manifests, and a store of blobs and unpacked layers."""

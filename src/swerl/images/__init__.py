"""Task images: registries, the store on disk, pulling, mirroring, building."""

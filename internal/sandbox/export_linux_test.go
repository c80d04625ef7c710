package sandbox

// HasCgroup reports whether commands get control groups here.
func HasCgroup() bool {
	dir := makeCgroup("test")
	removeCgroup(dir)
	return dir != ""
}

// CgroupFolder is cgroupFolder.
var CgroupFolder = cgroupFolder

// BoundCgroup is boundCgroup.
var BoundCgroup = boundCgroup

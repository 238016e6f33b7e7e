//! Which devices are near a GPU: those under its PCIe root complex, then those of its NUMA node.

use std::io;
use std::path::Path;

use reprise_io::PciAddress;

/// Place of a function in the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DevicePlace {
    /// Name of the root complex in sysfs, such as `pci0000:3a`.
    pub root: String,
    /// NUMA node; `None` if the machine has no such information.
    pub numa_node: Option<u32>,
}

/// Reads the place of a function from sysfs below `root`, which is `/` for this machine.
///
/// # Errors
/// There is no such function, or its entry is not below a root complex.
pub fn pci_place(root: &Path, address: PciAddress) -> io::Result<DevicePlace> {
    let entry = root.join("sys/bus/pci/devices").join(address.to_string());
    let path = std::fs::canonicalize(&entry)?;
    let names = path.components().filter_map(|part| part.as_os_str().to_str());
    // Only a root complex has a colon behind `pci`: `pci` alone is a bus of sysfs.
    let complex = names.into_iter().find(|name| name.starts_with("pci") && name.contains(':'));
    let Some(complex) = complex else {
        let text = format!("{} is not below a PCIe root complex", path.display());
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    };
    // -1 without NUMA.
    let numa_node = std::fs::read_to_string(path.join("numa_node")).ok();
    let numa_node = numa_node.and_then(|text| text.trim().parse().ok());
    Ok(DevicePlace { root: complex.to_owned(), numa_node })
}

/// Returns the devices, nearest to the GPU first: of its root complex, of its NUMA node, then the others and those
/// without a known place. Devices of equal distance keep their order.
pub fn prefer_near(gpu: &DevicePlace, devices: &[(u32, Option<DevicePlace>)]) -> Vec<u32> {
    let distance = |place: &Option<DevicePlace>| match place {
        Some(place) if place.root == gpu.root => 0,
        Some(place) if place.numa_node.is_some() && place.numa_node == gpu.numa_node => 1,
        Some(_) => 2,
        None => 3,
    };
    let mut order: Vec<&(u32, Option<DevicePlace>)> = devices.iter().collect();
    order.sort_by_key(|(_, place)| distance(place));
    order.into_iter().map(|(device, _)| *device).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// Creates a function below a root complex.
    fn function(root: &Path, complex: &str, address: &str, numa_node: &str) -> PciAddress {
        let folder = root.join("sys/devices").join(complex).join("0000:00:01.0").join(address);
        std::fs::create_dir_all(&folder).expect("a folder");
        std::fs::write(folder.join("numa_node"), format!("{numa_node}\n")).expect("a file");
        let links = root.join("sys/bus/pci/devices");
        std::fs::create_dir_all(&links).expect("a folder");
        symlink(&folder, links.join(address)).expect("a link");
        address.parse().expect("an address")
    }

    #[test]
    fn devices_under_the_root_of_the_gpu_come_first() {
        let folder = tempfile::tempdir().expect("a folder");
        let root = folder.path();
        let gpu = function(root, "pci0000:3a", "0000:3b:00.0", "0");
        let far = function(root, "pci0000:d7", "0000:d8:00.0", "1");
        let same_node = function(root, "pci0000:5d", "0000:5e:00.0", "0");
        let near = function(root, "pci0000:3a", "0000:3c:00.0", "0");
        let gpu = pci_place(root, gpu).expect("a place");
        assert_eq!(gpu, DevicePlace { root: "pci0000:3a".into(), numa_node: Some(0) });
        let place = |address| Some(pci_place(root, address).expect("a place"));
        let devices = [(0, None), (1, place(far)), (2, place(same_node)), (3, place(near))];
        assert_eq!(prefer_near(&gpu, &devices), [3, 2, 1, 0]);
    }

    #[test]
    fn machine_without_numa_prefers_by_root_only() {
        let folder = tempfile::tempdir().expect("a folder");
        let gpu = function(folder.path(), "pci0000:00", "0000:01:00.0", "-1");
        let other = function(folder.path(), "pci0000:80", "0000:81:00.0", "-1");
        let [gpu, other] = [gpu, other].map(|address| pci_place(folder.path(), address).expect("a place"));
        assert_eq!((gpu.numa_node, other.numa_node), (None, None));
        assert_eq!(prefer_near(&gpu, &[(7, Some(other)), (8, Some(gpu.clone()))]), [8, 7]);
    }

    #[test]
    fn missing_function_is_an_error() {
        let folder = tempfile::tempdir().expect("a folder");
        let address = "0000:01:00.0".parse().expect("an address");
        let error = pci_place(folder.path(), address).expect_err("nothing is there");
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}

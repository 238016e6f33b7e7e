//! Lists the node's GPUs from the directories of NVIDIA's driver below `/proc/driver/nvidia/gpus`. Each
//! contains a file of `Key: value` lines.
//!
//! The list comes from the kernel and requires neither privileges nor a library. A container sees it unless
//! its runtime hides it. A GPU is omitted until the driver knows its unique id (until the first use it
//! contains `?`). MIG instances are not listed.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use reprise_agent_kubernetes::GpuFact;

/// Directory of the driver's list, below the node's root.
const FOLDER: &str = "proc/driver/nvidia/gpus";
/// File with the properties of one GPU.
const FILE: &str = "information";
/// Read limit; the file has about a dozen lines.
const FILE_BYTES_MAX: u64 = 64 << 10;
/// Maximum number of GPUs, which is also the limit of the `CacheNode` status.
const GPUS_MAX: usize = 16;
/// Maximum length of a unique id.
const UUID_CHARS_MAX: usize = 64;

/// Returns all GPUs, sorted by unique id; none without a driver.
pub(super) fn read(root: &Path) -> Vec<GpuFact> {
    let folders = fs::read_dir(root.join(FOLDER)).into_iter().flatten().flatten();
    let mut gpus: Vec<GpuFact> = folders.filter_map(|folder| one(&folder.path().join(FILE))).collect();
    gpus.sort();
    gpus.dedup_by(|a, b| a.uuid == b.uuid);
    gpus.truncate(GPUS_MAX);
    gpus
}

fn one(file: &Path) -> Option<GpuFact> {
    let mut text = String::new();
    File::open(file).ok()?.take(FILE_BYTES_MAX).read_to_string(&mut text).ok()?;
    let value = |key: &str| {
        let mut pairs = text.lines().filter_map(|line| line.split_once(':'));
        pairs.find(|(found, _)| found.trim() == key).map(|(_, value)| value.trim())
    };
    let (uuid, product) = (value("GPU UUID")?, value("Model")?);
    let digits = uuid.strip_prefix("GPU-")?;
    let is_digit = |byte: u8| byte == b'-' || byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    let is_uuid = !digits.is_empty() && uuid.len() <= UUID_CHARS_MAX && digits.bytes().all(is_digit);
    (is_uuid && !product.is_empty()).then(|| GpuFact { uuid: uuid.to_owned(), product: product.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a root in which the driver lists GPUs with these properties.
    fn root(texts: &[&str]) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a folder");
        for (index, text) in texts.iter().enumerate() {
            let folder = root.path().join(FOLDER).join(format!("0000:{index:02x}:00.0"));
            fs::create_dir_all(&folder).expect("a folder");
            fs::write(folder.join(FILE), text).expect("written");
        }
        root
    }

    #[test]
    fn gpus_are_reported_with_the_names_of_the_driver() {
        // The driver's exact format, including tabs.
        let text = |uuid: &str| {
            format!(
                "Model: \t\t NVIDIA H200\nIRQ:   \t\t 514\nGPU UUID: \t {uuid}\nVideo BIOS: \t 96.00.bc.00.01\nBus Type: \t PCIe\n\
                 DMA Size: \t 52 bits\nDMA Mask: \t 0xfffffffffffff\nBus Location: \t 0000:19:00.0\nDevice Minor: \t 0\n\
                 GPU Firmware: \t 570.86.15\nGPU Excluded:\t No\n"
            )
        };
        let (one, other) =
            ("GPU-7e43a1f2-58aa-4a0c-9b1d-0c4de61c9f3a", "GPU-0e43a1f2-58aa-4a0c-9b1d-0c4de61c9f3b");
        let unknown = "GPU-????????-????-????-????-????????????";
        let root = root(&[&text(one), &text(other), &text(unknown), "Model: NVIDIA H200\n", ""]);
        let gpu = |uuid: &str| GpuFact { uuid: uuid.to_owned(), product: "NVIDIA H200".to_owned() };
        assert_eq!(read(root.path()), [gpu(other), gpu(one)]);
    }

    #[test]
    fn node_without_a_driver_has_no_gpus() {
        assert!(read(root(&[]).path()).is_empty());
    }
}

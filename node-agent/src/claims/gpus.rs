//! GPUs of the node, as NVIDIA's driver lists them: a folder each below `/proc/driver/nvidia/gpus`, with a file of `Key: value` lines.
//!
//! The list is the kernel's and needs no right and no library; a container sees it unless its runtime hides it. A GPU whose unique id the
//! driver does not tell (it writes `?` for digits until the GPU was used once) is left out until it does. MIG's parts of a GPU are not in the list.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use reprise_agent_kubernetes::GpuFact;

/// Where the driver lists them, below the node's root.
const FOLDER: &str = "proc/driver/nvidia/gpus";
/// What the driver says of one.
const FILE: &str = "information";
/// Of a file that has a dozen lines.
const FILE_BYTES_MAX: u64 = 64 << 10;
/// GPUs of one node: as many as its status tells of.
const GPUS_MAX: usize = 16;
/// Characters of a unique id.
const UUID_CHARS_MAX: usize = 64;

/// All of them, by their unique ids; none without a driver.
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

    /// A root in which the driver says this, one text a GPU.
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
    fn gpus_are_told_as_the_driver_names_them() {
        // As the driver writes it, tabs and all.
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
    fn a_node_without_a_driver_has_none() {
        assert!(read(root(&[]).path()).is_empty());
    }
}

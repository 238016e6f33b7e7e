//! Images without a container engine: files in an OCI archive, which nodes import. Nothing is pulled.
//!
//! An archive is a tar of `oci-layout`, `index.json` and blobs, which are named by their SHA-256: one layer
//! (itself a tar), the configuration and the manifest (OCI image layout 1.0.0, image specification 1.1).

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tar::{Builder, Header};

/// User id of the processes unless a pod sets another one: an unprivileged user.
const USER: &str = "65532";

/// An image that contains only programs.
#[derive(Clone, Debug)]
pub struct Image<'a> {
    /// Name of the image in pods. Its registry does not exist.
    pub name: &'a str,
    /// Command and arguments that are run.
    pub entrypoint: &'a [&'a str],
    /// Programs in the image, by absolute path, with their sources.
    pub files: &'a [(&'a str, PathBuf)],
}

/// A blob of an archive.
struct Blob {
    kind: &'static str,
    bytes: Vec<u8>,
}

impl Image<'_> {
    /// Writes the image's archive.
    ///
    /// # Panics
    /// If a file cannot be read, or the archive cannot be written.
    pub fn write(&self, archive: &Path) {
        let layer = Blob { kind: "application/vnd.oci.image.layer.v1.tar", bytes: self.layer() };
        let configuration = json!({
            "architecture": architecture(),
            "os": "linux",
            "config": { "Entrypoint": self.entrypoint, "User": USER },
            "rootfs": { "type": "layers", "diff_ids": [layer.digest()] },
        });
        let configuration = Blob::of("application/vnd.oci.image.config.v1+json", &configuration);
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": configuration.descriptor(),
            "layers": [layer.descriptor()],
        });
        let manifest = Blob::of("application/vnd.oci.image.manifest.v1+json", &manifest);
        let mut named = manifest.descriptor();
        named["annotations"] = json!({ "io.containerd.image.name": self.name });
        let index = json!({ "schemaVersion": 2, "manifests": [named] });
        let mut tar = Builder::new(File::create(archive).expect("the test's folder is writable"));
        add(&mut tar, "oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#, 0o644);
        add(&mut tar, "index.json", index.to_string().as_bytes(), 0o644);
        for blob in [layer, configuration, manifest] {
            let path = format!("blobs/{}", blob.digest().replace(':', "/"));
            add(&mut tar, &path, &blob.bytes, 0o644);
        }
        tar.finish().expect("the archive can be written");
    }

    fn layer(&self) -> Vec<u8> {
        let mut tar = Builder::new(Vec::new());
        for (inside, file) in self.files {
            let bytes = fs::read(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
            add(&mut tar, inside.trim_start_matches('/'), &bytes, 0o755);
        }
        tar.into_inner().expect("writes to memory succeed")
    }
}

impl Blob {
    fn of(kind: &'static str, value: &Value) -> Blob {
        Blob { kind, bytes: value.to_string().into_bytes() }
    }

    fn digest(&self) -> String {
        let hexadecimal = Sha256::digest(&self.bytes).into_iter().map(|byte| format!("{byte:02x}"));
        format!("sha256:{}", hexadecimal.collect::<String>())
    }

    fn descriptor(&self) -> Value {
        json!({ "mediaType": self.kind, "digest": self.digest(), "size": self.bytes.len() })
    }
}

fn add<W: Write>(tar: &mut Builder<W>, path: &str, bytes: &[u8], mode: u32) {
    let mut header = Header::new_gnu();
    header.set_mode(mode);
    header.set_size(bytes.len() as u64);
    tar.append_data(&mut header, path, bytes).expect("paths are short and writes succeed");
}

/// Returns the machine's architecture as images name it.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

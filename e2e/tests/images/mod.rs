//! The inputs of an image's digest: everything that changes the image, and nothing else. And the contents of
//! images.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use reprise_e2e::kubernetes::programs;
use reprise_e2e::tree;
use serde_json::{Value, json};

/// Programs of the images that are Rust.
const PROGRAMS: [&str; 4] = ["reprise-agent", "reprise-controlplane", "reprise-operator", "reprise"];

/// Prints the inputs of images of a profile.
const SCRIPT: &str = "set -euo pipefail; . images/made-of.sh; made_of \"$0\"";

/// Build flags that may be set in the environment of the tests.
const FLAGS: [&str; 4] = ["RUSTFLAGS", "CARGO_PROFILE_IMAGES_LTO", "CC_x86_64_unknown_linux_musl", "CFLAGS"];

/// Returns the inputs of images of a profile, with a variable in the environment.
fn made_of(profile: &str, variable: Option<(&str, &str)>) -> BTreeSet<String> {
    let mut command = Command::new("bash");
    command.current_dir(tree()).args(["-c", SCRIPT, profile]);
    for flag in FLAGS {
        command.env_remove(flag);
    }
    command.envs(variable);
    let output = command.output().expect("bash can be run");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()
}

/// Returns the first line that a tool prints with `--version`, or that it does not exist.
fn version(tool: &str) -> String {
    let output = Command::new(tool).arg("--version").current_dir(tree()).output().ok();
    let output = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    let first = output.and_then(|text| text.lines().next().map(str::to_owned));
    first.unwrap_or_else(|| format!("no {tool}"))
}

#[test]
fn inputs_of_images_are_sources_locks_configurations_and_tools() {
    let all = made_of("images", None);
    let has = |word: &str| all.iter().any(|line| line.contains(word));
    for word in [
        "  .cargo/config.toml",
        "  Cargo.lock",
        "  Cargo.toml",
        "  Dockerfile",
        "  cuda/build.rs",
        "  e2e/Cargo.toml",
        "  e2e/etcd/go.mod",
        "  e2e/etcd/go.sum",
        "  e2e/go.sh",
        "  images/made-of.sh",
        "  operator/src/main.rs",
        "  proto/protos/controlplane.proto",
    ] {
        assert!(has(word), "no input {word}: {all:#?}");
    }
    for tool in ["rustc", "cargo", "musl-gcc", "objcopy", "buildah"] {
        assert!(all.contains(&version(tool)), "no input {tool}: {all:#?}");
    }
    assert!(!has("docs/"), "documents are not inputs: {all:#?}");
    assert_eq!(made_of("images", None), all);
}

#[test]
fn flags_and_the_profile_are_inputs_and_folders_are_not() {
    let plain = made_of("images", None);
    let dev = made_of("dev", None);
    assert!(
        dev.contains(&version("ldd")) && !plain.contains(&version("ldd")),
        "the machine's C library is an input: {dev:#?}"
    );
    assert!(!dev.contains(&version("musl-gcc")), "musl is not an input: {dev:#?}");
    for flag in FLAGS {
        let with = made_of("images", Some((flag, "thin")));
        let more: Vec<&String> = with.difference(&plain).collect();
        assert_eq!(more, [&format!("{flag}=thin")]);
    }
    for folder in ["CARGO_TARGET_DIR", "CARGO_TARGET_TMPDIR", "REPRISE_CACHE", "PROTOC"] {
        assert_eq!(made_of("images", Some((folder, "/elsewhere"))), plain, "{folder}");
    }
}

/// Configuration and files of an image in an archive.
struct Image {
    config: Value,
    files: BTreeSet<String>,
}

impl Image {
    fn read(archive: &Path) -> Image {
        let folder = tempfile::tempdir().expect("a folder");
        run_tar(&["-xf", text(archive), "-C", text(folder.path())]);
        let json = |path: &Path| -> Value {
            let bytes = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            serde_json::from_slice(&bytes).expect("OCI's documents are JSON")
        };
        let blob = |descriptor: &Value| {
            let digest = descriptor["digest"].as_str().expect("descriptors have digests");
            folder.path().join("blobs").join(digest.replace(':', "/"))
        };
        let index = json(&folder.path().join("index.json"));
        let manifest = json(&blob(&index["manifests"][0]));
        let layers = manifest["layers"].as_array().expect("an image has layers");
        let listed = layers.iter().map(|layer| run_tar(&["-tf", text(&blob(layer))]));
        let files = listed.flat_map(|list| list.lines().map(str::to_owned).collect::<Vec<String>>());
        let is_file = |path: &String| !path.ends_with('/');
        Image { config: json(&blob(&manifest["config"])), files: files.filter(is_file).collect() }
    }
}

fn text(path: &Path) -> &str {
    path.to_str().expect("paths of tests are UTF-8")
}

fn run_tar(arguments: &[&str]) -> String {
    let output = Command::new("tar").args(arguments).output().expect("tar can be run");
    assert!(output.status.success(), "tar {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Names and versions of the components of a bill of materials, the program included.
fn components(bill: &Value) -> BTreeSet<(String, String)> {
    assert_eq!((&bill["bomFormat"], &bill["specVersion"]), (&json!("CycloneDX"), &json!("1.5")));
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    let of = |component: &Value| (text(&component["name"]), text(&component["version"]));
    let others = bill["components"].as_array().expect("a list").iter();
    others.chain([&bill["metadata"]["component"]]).map(of).collect()
}

/// Runs a command in the tree and returns its lines.
fn lines(program: &str, arguments: &[&str]) -> Vec<String> {
    let output = Command::new(program).args(arguments).current_dir(tree()).output().expect("it can be run");
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()
}

/// Prints the bill of an image's program.
fn bill(image: &str, profile: &str) -> Value {
    let script = tree().join("images/sbom.sh");
    let text = lines(script.to_str().expect("paths of tests are UTF-8"), &[image, profile]).join("\n");
    serde_json::from_str(&text).expect("a bill is JSON")
}

/// Names and versions of the crates that are compiled into each program, resolved for all programs of the images together,
/// as they are built: whole trees, without repeated parts left out.
fn crates() -> BTreeMap<String, BTreeSet<(String, String)>> {
    let target = format!("{}-unknown-linux-musl", std::env::consts::ARCH);
    let mut arguments = vec!["tree", "--locked", "--no-dedupe", "--edges", "normal,no-proc-macro"];
    arguments.extend(["--prefix", "depth", "--target", &target, "--no-default-features"]);
    arguments.extend(["--features", "reprise-agent/kubernetes"]);
    arguments.extend(PROGRAMS.iter().flat_map(|program| ["--package", program]));
    let mut of_programs: BTreeMap<String, BTreeSet<(String, String)>> = BTreeMap::new();
    let mut program = String::new();
    for line in lines("cargo", &arguments).iter().filter(|line| !line.is_empty()) {
        let name = line.trim_start_matches(|digit: char| digit.is_ascii_digit());
        let mut words = name.split(' ');
        let (name, version) = (words.next().expect("a name"), words.next().expect("a version"));
        if line.starts_with('0') {
            program = name.to_owned();
        }
        let one = (name.to_owned(), version.trim_start_matches('v').to_owned());
        of_programs.entry(program.clone()).or_default().insert(one);
    }
    of_programs
}

#[test]
fn bill_of_materials_lists_exactly_the_crates_of_a_program() {
    let compiled = crates();
    for image in PROGRAMS {
        let bill = bill(image, "images");
        assert_eq!(bill["metadata"]["component"]["name"], image);
        let (listed, compiled) = (components(&bill), &compiled[image]);
        assert!(compiled.len() > 50, "{compiled:?}");
        let wrong: Vec<_> = listed.symmetric_difference(compiled).collect();
        assert!(wrong.is_empty(), "{image}: {wrong:?}");
        let known = |component: &Value| {
            let is_own = component["name"].as_str().is_some_and(|name| name.starts_with("reprise"));
            let is_licensed = component["licenses"][0]["expression"].is_string();
            (is_own || component["hashes"][0]["alg"] == "SHA-256") && is_licensed
        };
        let all = bill["components"].as_array().expect("a list");
        let unknown: Vec<&Value> = all.iter().filter(|component| !known(component)).collect();
        assert!(unknown.is_empty(), "without checksum or licence: {unknown:?}");
    }
}

#[test]
fn an_archive_has_a_bill_with_the_crates_that_its_program_names() {
    let version = env!("CARGO_PKG_VERSION");
    for archive in programs::images().expect("the images can be built") {
        let file = archive.file_name().expect("a file").to_string_lossy();
        let image = file.strip_suffix(&format!("-{version}.tar")).expect("the name of an image").to_owned();
        let text = std::fs::read(archive.with_extension("cdx.json")).expect("a bill next to the archive");
        let listed = components(&serde_json::from_slice(&text).expect("a bill is JSON"));
        let names: BTreeSet<&str> = listed.iter().map(|(name, _)| name.as_str()).collect();
        if image == "reprise-etcd" {
            assert!(
                names.contains("go.etcd.io/etcd/server/v3") && names.contains("go.uber.org/zap"),
                "{names:?}"
            );
            continue;
        }
        // Panics name the source files of their crates.
        let folder = tempfile::tempdir().expect("a folder");
        let program = program_of(&archive, &image, folder.path());
        let named = crates_named_in(&std::fs::read(program).expect("the program of the image"));
        assert!(named.len() > 20, "{image}: {named:?}");
        let missing: Vec<_> = named.iter().filter(|name| !listed.contains(*name)).collect();
        assert!(missing.is_empty(), "{image} has crates that its bill lacks: {missing:?}");
    }
}

/// Unpacks the program of an image.
fn program_of(archive: &Path, image: &str, folder: &Path) -> std::path::PathBuf {
    run_tar(&["-xf", text(archive), "-C", text(folder)]);
    let blobs = std::fs::read_dir(folder.join("blobs/sha256"))
        .expect("blobs")
        .map(|blob| blob.expect("a blob").path());
    for blob in blobs {
        // Other blobs are documents of JSON.
        let listed = Command::new("tar").args(["-tf", text(&blob)]).output().expect("tar can be run");
        if String::from_utf8_lossy(&listed.stdout).lines().any(|line| line == image) {
            run_tar(&["-xf", text(&blob), "-C", text(folder), image]);
        }
    }
    folder.join(image)
}

/// Crates of the registry whose source files a program names: `…/registry/src/INDEX/NAME-VERSION/…`.
fn crates_named_in(program: &[u8]) -> BTreeSet<(String, String)> {
    let text = String::from_utf8_lossy(program);
    let crate_of = |rest: &str| {
        let folder = rest.split('/').nth(1)?;
        let at = folder.char_indices().find(|(at, c)| {
            *c == '-'
                && folder[at + 1..].starts_with(|next: char| next.is_ascii_digit())
                && folder[at + 1..].contains('.')
        })?;
        Some((folder[..at.0].to_owned(), folder[at.0 + 1..].to_owned()))
    };
    text.split("/registry/src/").skip(1).filter_map(crate_of).collect()
}

#[test]
fn an_image_contains_one_program_and_runs_unprivileged_with_labels() {
    let archives = programs::images().expect("the images can be built");
    let version = env!("CARGO_PKG_VERSION");
    let profile = std::env::var("REPRISE_IMAGES_PROFILE").unwrap_or_else(|_| "dev".to_owned());
    let names = ["reprise-agent", "reprise-controlplane", "reprise-operator", "reprise", "reprise-etcd"];
    assert_eq!(archives.len(), names.len(), "{archives:?}");
    for (name, archive) in names.into_iter().zip(&archives) {
        assert!(archive.ends_with(format!("{name}-{version}.tar")), "{}", archive.display());
        let Image { config, files } = Image::read(archive);
        let settings = &config["config"];
        assert_eq!(settings["User"], "65532:65532", "{name}");
        assert_eq!(settings["Entrypoint"], json!([format!("/{name}")]), "{name}");
        let labels = &settings["Labels"];
        assert_eq!(labels["org.opencontainers.image.title"], name);
        assert_eq!(labels["org.opencontainers.image.version"], version, "{name}");
        assert_eq!(labels["org.opencontainers.image.licenses"], "Apache-2.0", "{name}");
        assert!(files.contains(name), "{name} is missing: {files:?}");
        // etcd is static in both profiles.
        let has_libraries = profile == "dev" && name != "reprise-etcd";
        assert_eq!(files.iter().any(|file| file.contains("libc.so")), has_libraries, "{name}: {files:?}");
        let is_library = |file: &&String| file.contains(".so");
        let others: Vec<&String> = files.iter().filter(|file| !is_library(file) && *file != name).collect();
        assert!(others.is_empty(), "unexpected files in {name}: {others:?}");
        assert!(has_libraries || files.len() == 1, "{name} is not the only file: {files:?}");
    }
}

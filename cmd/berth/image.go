package main

import (
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"berth/runtime/admin"
)

func imageCommand() *cobra.Command {
	c := &cobra.Command{
		Use: "image", Short: "List, inspect, remove, pin, import, export, check and count the daemon's images",
		Long: `Work with the images of the running daemon, as root, over its CRI socket.

An image is named as in a pull ("busybox" is docker.io/library/busybox:latest), by
name@digest, or by its id or the beginning of that.`,
	}
	d := ofDaemon(c)
	c.AddCommand(imageList(d), imageInspect(d), imageRemove(d), imagePin(d, true), imagePin(d, false), imageImport(d), imageExport(d), imageCheck(d), imageDu(d))
	return c
}

func imageList(d *daemon) *cobra.Command {
	c := &cobra.Command{
		Use: "list", Aliases: []string{"ls"}, Short: "List all images", Args: cobra.NoArgs,
		Long: `List all images: a line for each name. SIZE is what the image takes on disk, layers
that it shares with others included (berth image du tells those apart). PULLED is how
long ago it was pulled or imported, CREATED how old it says it is. USED BY counts the
containers that have it as their root or as a volume, ended ones too.`,
	}
	c.RunE = func(cmd *cobra.Command, _ []string) error {
		reply, err := ask(cmd.Context(), d, admin.ListImages, admin.ListImagesRequest{})
		if err != nil {
			return err
		}
		return d.print(cmd, reply, func(w io.Writer) { imageTable(w, reply.Images, time.Now()) })
	}
	return d.listing(c)
}

// imageTable has a row for each tag; an image without one is shown by a digest, or
// with nothing but its id.
func imageTable(w io.Writer, images []admin.Image, now time.Time) {
	fmt.Fprintln(w, "NAME\tID\tSIZE\tPINNED\tPULLED\tCREATED\tUSED BY")
	for _, i := range images {
		names := i.Tags
		if len(names) == 0 && len(i.Digests) > 0 {
			names = i.Digests[:1]
		}
		if len(names) == 0 {
			names = []string{"<none>"}
		}
		pinned, created := "", ""
		if i.Pinned {
			pinned = "pinned"
		}
		if i.Created != nil {
			created = ago(now, *i.Created)
		}
		for _, n := range names {
			fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%s\n", n, short(i.ID), size(float64(i.Size)), pinned, ago(now, i.PulledAt), created, usedBy(i.UsedBy))
		}
	}
}

// ago is how long ago something was; what lies in the future was just now.
func ago(now, then time.Time) string { return age(max(now.Sub(then), 0).Seconds()) }

func usedBy(users []admin.User) string {
	switch len(users) {
	case 0:
		return ""
	case 1:
		return users[0].Pod + "/" + users[0].Name
	}
	return fmt.Sprintf("%d containers", len(users))
}

func imageInspect(d *daemon) *cobra.Command {
	c := &cobra.Command{
		Use: "inspect NAME", Short: "Show everything that is stored of an image", Args: cobra.ExactArgs(1),
		Long: `Show everything that is stored of an image: names, digests and users, its layers
with their sizes and the images they are shared with. With -o json also manifest,
indexes and config as they came.`,
	}
	c.RunE = func(cmd *cobra.Command, args []string) error {
		reply, err := ask(cmd.Context(), d, admin.InspectImage, admin.InspectImageRequest{Image: args[0]})
		if err != nil {
			return err
		}
		return d.print(cmd, reply, func(w io.Writer) { imageDetails(w, reply, time.Now()) })
	}
	return d.listing(c)
}

func imageDetails(w io.Writer, i *admin.InspectImageReply, now time.Time) {
	fmt.Fprintf(w, "id:\t%s\n", i.ID)
	for _, t := range i.Tags {
		fmt.Fprintf(w, "tag:\t%s\n", t)
	}
	for _, t := range i.Digests {
		fmt.Fprintf(w, "digest:\t%s\n", t)
	}
	if i.Artifact != "" {
		fmt.Fprintf(w, "artifact:\t%s\n", i.Artifact)
	}
	fmt.Fprintf(w, "manifest:\t%s (%s)\n", i.Manifest.Digest, i.Manifest.MediaType)
	for _, m := range i.Others {
		fmt.Fprintf(w, "found by:\t%s (%s)\n", m.Digest, m.MediaType)
	}
	signatures := len(i.Manifest.Signatures)
	for _, m := range i.Others {
		signatures += len(m.Signatures)
	}
	fmt.Fprintf(w, "signatures:\t%d\n", signatures)
	fmt.Fprintf(w, "size:\t%s (%d bytes)\n", size(float64(i.Size)), i.Size)
	fmt.Fprintf(w, "pinned:\t%v\n", i.Pinned)
	fmt.Fprintf(w, "pulled:\t%s (%s ago)\n", i.PulledAt.Format(time.RFC3339), ago(now, i.PulledAt))
	if i.Created != nil {
		fmt.Fprintf(w, "created:\t%s (%s ago)\n", i.Created.Format(time.RFC3339), ago(now, *i.Created))
	}
	for _, u := range i.UsedBy {
		fmt.Fprintf(w, "used by:\t%s/%s (container %s)\n", u.Pod, u.Name, short(u.Container))
	}
	fmt.Fprintf(w, "\nLAYER\tBLOB\tBLOB SIZE\tSIZE\tINODES\tSHARED BY\tDIRECTORY\n")
	for _, l := range i.Layers {
		shared := ""
		if n := len(l.SharedBy); n > 0 {
			shared = fmt.Sprintf("%d images", n)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%d\t%s\t%s\n", short(l.DiffID), short(l.Blob), size(float64(l.BlobSize)), size(float64(l.Size)), l.Inodes, shared, l.Dir)
	}
}

func imageRemove(d *daemon) *cobra.Command {
	return &cobra.Command{
		Use: "remove NAME...", Aliases: []string{"rm"}, Short: "Remove images, each with all its names", Args: cobra.MinimumNArgs(1),
		Long: `Remove images, each with all its names, whichever of them is given. Pinned ones go
too. What a container uses stays on disk until the last such container is removed.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			return eachOf(args, func(name string) error {
				reply, err := ask(cmd.Context(), d, admin.RemoveImage, admin.RemoveImageRequest{Image: name})
				if err != nil {
					return err
				}
				removed(cmd.OutOrStdout(), reply)
				return nil
			})
		},
	}
}

// removed tells what went.
func removed(w io.Writer, r *admin.RemoveImageReply) {
	for _, n := range append(r.Tags, r.Digests...) {
		fmt.Fprintln(w, "untagged", n)
	}
	if len(r.UsedBy) == 0 {
		fmt.Fprintf(w, "removed  %s, %s freed\n", r.ID, size(float64(r.Freed)))
		return
	}
	fmt.Fprintf(w, "removed  %s; its layers, %s, go with the last of its containers:\n", r.ID, size(float64(r.Freed)))
	for _, u := range r.UsedBy {
		fmt.Fprintf(w, "         %s/%s (%s)\n", u.Pod, u.Name, short(u.Container))
	}
}

func imagePin(d *daemon, pinned bool) *cobra.Command {
	verb, what := "pin", "Keep the kubelet's garbage collection off images"
	if !pinned {
		verb, what = "unpin", "Leave images to the kubelet's garbage collection again"
	}
	return &cobra.Command{
		Use: verb + " NAME...", Short: what, Args: cobra.MinimumNArgs(1),
		Long: what + `.

A pin is the image's, whichever of its names is given. It goes with the image, or
with the last of its tags when that moves to another image. What the configuration
pins (image.pinned) cannot be unpinned here.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			return eachOf(args, func(name string) error {
				i, err := ask(cmd.Context(), d, admin.PinImage, admin.PinImageRequest{Image: name, Pinned: pinned})
				if err == nil {
					fmt.Fprintln(cmd.OutOrStdout(), verb+"ned", i.ID, strings.Join(i.Tags, " "))
				}
				return err
			})
		},
	}
}

func imageImport(d *daemon) *cobra.Command {
	var pin bool
	c := &cobra.Command{
		Use: "import FILE...", Short: "Import docker or OCI archives (plain, gzip or zstd)", Args: cobra.MinimumNArgs(1),
		Long: `Import the images of archives that docker save, berth image export, or a tool for
OCI layouts has written, plain or compressed with gzip or zstd, and print a name of
each. The daemon reads the files. One that is broken does not keep the others out.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			return eachOf(args, func(file string) error {
				path, err := absolute(file)
				if err != nil {
					return err
				}
				reply, err := ask(cmd.Context(), d, admin.ImportImage, admin.ImportRequest{Path: path, Pin: pin})
				if err != nil {
					return err
				}
				for _, n := range reply.Images {
					fmt.Fprintln(cmd.OutOrStdout(), n)
				}
				return nil
			})
		},
	}
	c.Flags().BoolVar(&pin, "pin", false, "pin the images, see berth image pin")
	return c
}

func imageExport(d *daemon) *cobra.Command {
	return &cobra.Command{
		Use: "export NAME FILE", Short: "Export an image into an archive", Args: cobra.ExactArgs(2),
		Long: `Write an image into an archive, which berth image import, docker load and tools for
OCI layouts read. By a tag it gets this name, by an id or a digest all its tags. The
file must not exist; it is compressed when its name ends in .gz, .tgz or .zst. The
daemon writes it, mode 0600.

berth keeps layers unpacked. Unless image.keep_layer_blobs has kept all of the image's
layers as they came, they are packed anew: the archive has the same files, but other
digests, so the image has another id where it is imported, and signatures of the
original do not fit. The command says which it was.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			path, err := absolute(args[1])
			if err != nil {
				return err
			}
			reply, err := ask(cmd.Context(), d, admin.ExportImage, admin.ExportRequest{Image: args[0], Path: path})
			if err != nil {
				return err
			}
			how := "layers packed anew"
			if reply.Exact {
				how = "exactly as it came"
			}
			fmt.Fprintf(cmd.OutOrStdout(), "%s %s %s: %s, %s\n", path, reply.ID, strings.Join(reply.Names, " "), size(float64(reply.Bytes)), how)
			return nil
		},
	}
}

// absolute is a FILE as the daemon needs it, which has another working directory.
func absolute(file string) (string, error) {
	if file == "" {
		return "", errors.New("FILE is empty")
	}
	return filepath.Abs(file)
}

// eachOf goes on after an error, and has them all.
func eachOf(args []string, f func(arg string) error) error {
	var all []error
	for _, arg := range args {
		if err := f(arg); err != nil {
			all = append(all, err)
		}
	}
	return errors.Join(all...)
}
